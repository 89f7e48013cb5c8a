// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <iterator>
#include <sstream>
#include <vector>

#include "core/kv_layout.h"
#include "rooftile/error.h"
#include "rooftile/gemm.h"
#include "rooftile/kv_cache.h"
#include "rooftile/names.h"
#include "rooftile/tensor.h"

namespace rooftile {

std::string_view beginning(std::string_view text, std::size_t longest) {
  if (text.size() <= longest) return text;
  while (longest > 0 && (text[longest] & 0xC0) == 0x80) --longest;  // a byte that goes on with a character
  return text.substr(0, longest);
}

std::string quoted(std::string_view text) {
  const std::string_view shown = beginning(text, 120);
  const std::string all = '"' + std::string(shown);
  return shown == text ? all + '"' : all + "...\" (" + std::to_string(text.size()) + " bytes)";
}

std::string did_you_mean(std::string_view given, std::span<const std::string> known) {
  const auto lower = [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; };
  std::string_view best;
  std::size_t most = 0, out_of = 1;
  for (const std::string& name : known) {
    std::vector<std::size_t> common(name.size() + 1);  // of what was seen of `given` and the first j letters of name
    for (const char c : given.substr(0, 64))
      for (std::size_t j = 0, diagonal = 0; j < name.size(); ++j) {
        const std::size_t above = common[j + 1];
        common[j + 1] = lower(c) == lower(name[j]) ? diagonal + 1 : std::max(above, common[j]);
        diagonal = above;
      }
    const std::size_t both = 2 * common.back(), length = given.size() + name.size();
    if (2 * both < length || both * out_of <= most * length) continue;
    best = name;
    most = both;
    out_of = length;
  }
  return best.empty() ? "" : ", did you mean \"" + std::string(best) + "\"?";
}

const char* name(DType t) {
  switch (t) {
    case DType::f32:
      return "float32";
    case DType::f16:
      return "float16";
    case DType::bf16:
      return "bfloat16";
    case DType::f8_e4m3:
      return "float8_e4m3fn";
    case DType::i8:
      return "int8";
    case DType::u8:
      return "uint8";
    case DType::i32:
      return "int32";
    case DType::i64:
      return "int64";
  }
  return "?";
}

std::string name(Device d) { return d.type == DeviceType::cpu ? "cpu" : "cuda:" + std::to_string(d.index); }

std::string shape_text(const TensorView& t) {
  std::ostringstream text;
  text << '[';
  for (int i = 0; i < t.ndim; ++i) text << (i ? ", " : "") << t.shape[i];
  text << ']';
  return text.str();
}

std::string describe(const TensorView& t) {
  return t.given() ? std::string(name(t.dtype)) + shape_text(t) + " on " + name(t.device) : "nothing";
}

bool same_shape(const TensorView& a, const TensorView& b) {
  if (a.ndim != b.ndim) return false;
  for (int i = 0; i < a.ndim; ++i)
    if (a.shape[i] != b.shape[i]) return false;
  return true;
}

KvFormat kv_format_from_name(const char* op, const char* text) {
  std::string known;
  std::vector<std::string> names;
  for (int i = 0; i < kv_format_count; ++i) {
    const auto f = static_cast<KvFormat>(i);
    names.emplace_back(name(f));
    if (names.back() == text) return f;
    known += (i ? ", " : "") + names.back();
  }
  fail(ErrorKind::value, op, ": format ", quoted(text), " is not a cache format; known: ", known,
       did_you_mean(text, names));
}

std::size_t kv_block_bytes(KvFormat f, int page_size, int head_dim, const char* op) {
  ROOFTILE_CHECK_KIND(not_supported, head_dim >= 1 && head_dim <= max_head_dim, op, ": head_dim must be 1 to ",
                      max_head_dim, ", got ", head_dim);
  return static_cast<std::size_t>(kv_block(f, page_size, head_dim).bytes);
}

const char* name(W4Zeros z) {
  switch (z) {
    case W4Zeros::symmetric:
      return "symmetric";
    case W4Zeros::integer:
      return "integer";
    case W4Zeros::minima:
      return "minima";
  }
  return "?";
}

W4Zeros w4_zeros_from_name(const char* op, const char* text) {
  const std::string known = text;
  for (W4Zeros z : {W4Zeros::symmetric, W4Zeros::integer, W4Zeros::minima})
    if (known == name(z)) return z;
  fail(ErrorKind::value, op, ": zeros must be \"symmetric\", \"integer\" or \"minima\", got ", quoted(text));
}

const char* name(Activation a) {
  switch (a) {
    case Activation::none:
      return "none";
    case Activation::silu:
      return "silu";
    case Activation::gelu_tanh:
      return "gelu_tanh";
    case Activation::gelu_erf:
      return "gelu";
  }
  return "?";
}

constexpr Activation activations[] = {Activation::silu, Activation::gelu_erf, Activation::gelu_tanh};  // with a name

std::vector<std::string> activation_names(bool gated) {
  std::vector<std::string> names;
  for (Activation a : activations) names.push_back(std::string(name(a)) + (gated ? "_mul" : ""));
  return names;
}

Activation activation_from_name(const char* op, const char* text, bool* gated) {
  const std::string given = text;
  for (Activation a : activations) {
    const bool multiplies = gated && given == std::string(name(a)) + "_mul";
    if (given == name(a) || multiplies) {
      if (gated) *gated = multiplies;
      return a;
    }
  }
  std::vector<std::string> names = activation_names(false);
  if (gated) std::ranges::copy(activation_names(true), std::back_inserter(names));
  std::string known;
  for (std::size_t i = 0; i < names.size(); ++i)
    known += (i == 0 ? "" : i + 1 < names.size() ? ", " : " or ") + quoted(names[i]);
  fail(ErrorKind::value, op, ": activation must be ", known, ", got ", quoted(text), did_you_mean(text, names));
}

}  // namespace rooftile
