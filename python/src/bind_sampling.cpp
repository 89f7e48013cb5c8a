// SPDX-License-Identifier: Apache-2.0
#include <cstring>
#include <string>

#include "bind.h"
#include "rooftile/names.h"
#include "rooftile/sampling.h"
#include "tensor_caster.h"

namespace rooftile::python {

using namespace nb::literals;
using nb::handle;

namespace {

SampleOrder order_of(Args& args, handle h) {
  const char* text = args.text(h, "order");
  if (std::strcmp(text, "transformers") == 0) return SampleOrder::transformers;
  if (std::strcmp(text, "vllm") == 0) return SampleOrder::vllm;
  const std::string known[] = {"transformers", "vllm"};
  fail(ErrorKind::value, "sample: order must be \"transformers\" or \"vllm\", got ", quoted(text),
       did_you_mean(text, known));
}

}  // namespace

void bind_sampling(nb::module_& m) {
  m.def(
      "sample",
      [](handle logits, handle temperature, handle top_k, handle top_p, handle min_p, handle repetition_penalty,
         handle token_ids, handle seeds, handle positions, handle order, handle out, handle stream, handle plan) {
        Args args("sample");
        const TensorView tl = args.in(logits, "logits");
        SampleSettings settings{.temperature = args.number(temperature, "temperature")};
        if (!top_k.is_none()) {
          settings.top_k = args.integer(top_k, "top_k");
          ROOFTILE_CHECK(settings.top_k >= 1, "sample: top_k must be at least 1, or None for all tokens, got ",
                         settings.top_k);
        }
        if (!top_p.is_none()) settings.top_p = args.number(top_p, "top_p");
        if (!min_p.is_none()) settings.min_p = args.number(min_p, "min_p");
        if (!repetition_penalty.is_none())
          settings.repetition_penalty = args.number(repetition_penalty, "repetition_penalty");
        settings.order = order_of(args, order);
        const TensorView ti = args.optional(token_ids, "token_ids"), ts = args.optional(seeds, "seeds");
        const TensorView tp = args.optional(positions, "positions"), to = args.out(out, "out");
        const Context ctx = args.context(tl, stream, plan);
        return run([&] { return sample(ctx, tl, ti, ts, tp, settings, to); });
      },
      "logits"_a.none(), "temperature"_a.none(), "top_k"_a.none(), "top_p"_a.none(), "min_p"_a.none(),
      "repetition_penalty"_a.none(), "token_ids"_a.none(), "seeds"_a.none(), "positions"_a.none(), "order"_a.none(),
      "out"_a.none(), "stream"_a.none(), "plan"_a.none());
}

}  // namespace rooftile::python
