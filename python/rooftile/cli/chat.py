# SPDX-License-Identifier: Apache-2.0
"""`rooftile chat`: a conversation with a model, each turn over the cache of the turns before."""

import sys

from rooftile.cli._files import check_utf8
from rooftile.cli._model import Model, add_model_arguments
from rooftile.errors import ArgumentError, NotSupportedError, RooftileError

SUMMARY = "talk with a model: a GGUF file or a folder, with rooftile's weights, caches and decode steps"

_HELP = "/reset begins anew, /exit or the end of input ends"


def add_arguments(parser):
    add_model_arguments(parser)
    parser.add_argument("--system", metavar="TEXT", help="what the model is told before the first turn")


def run(args):
    if args.system is not None:
        check_utf8(args.system, "--system")
    model = Model(args)
    if not getattr(model.tokenizer, "chat_template", None):
        raise NotSupportedError(f"MODEL {args.model}: has no chat template; rooftile generate goes on with any text")
    conversation = Conversation(model, args.system, args.max_new_tokens)
    asks = sys.stdin is not None and sys.stdin.isatty()
    if asks:
        print(_HELP, file=sys.stderr)
    while (line := _line(asks)) is not None and line != "/exit":
        if line == "/reset":
            conversation.reset()
        elif line:
            timing = conversation.say(line)
            print(f"{timing.words()}; {conversation.tokens} tokens in the cache", file=sys.stderr)
    return 0


def _line(asks):
    """What is said next, or None at the end of input."""
    try:
        return check_utf8(input("> " if asks else ""), "standard input").strip()
    except EOFError:
        return None
    except RuntimeError as e:  # no standard input
        raise ArgumentError(f"standard input: {e}") from e
    except UnicodeDecodeError as e:
        raise ArgumentError(f"standard input: not UTF-8 text: {e.reason} at byte {e.start}") from e


class Conversation:
    """Turns, and the cache that holds them."""

    def __init__(self, model, system, most):
        self.model, self.system, self.most = model, system, most
        self.reset()

    def reset(self):
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        self._begin()

    def _begin(self):
        self.cache, self._held = self.model.new_cache(), []  # the ids that the cache holds

    @property
    def tokens(self):
        return self.cache.get_seq_length()

    def say(self, text):
        """Prints the answer to one turn, and returns its Timing. A turn that is refused leaves the others."""
        import torch

        messages = [*self.messages, {"role": "user", "content": text}]
        ids = self._tokens_of(messages)
        self.model.check_length("the conversation", len(ids), self.most)
        self._keep_beginning(ids)
        prompt = torch.tensor([ids], dtype=torch.int64, device=self.model.device)
        new, timing = self.model.write(prompt, self.cache, self.most, show=True)
        answer = self.model.tokenizer.decode(new, skip_special_tokens=True)
        self.messages = [*messages, {"role": "assistant", "content": answer}]
        self._held = [*ids, *new.tolist()][: self.tokens]
        return timing

    def _tokens_of(self, messages):
        import jinja2

        try:
            return self.model.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=True
            )["input_ids"]
        except jinja2.TemplateError as e:  # a template may refuse, such as a system message
            raise ArgumentError(f"the model's chat template refuses this conversation: {e}") from e

    def _keep_beginning(self, ids):
        """The cache keeps the tokens that `ids` begins with, at least one fewer than there are."""
        same = 0
        while same < min(len(self._held), len(ids) - 1) and self._held[same] == ids[same]:
            same += 1
        if same == self.tokens:
            return
        for keep in (same, same // 32 * 32):  # kivi formats go back to whole groups
            try:
                self.cache.crop(keep - self.tokens)
                return
            except RooftileError:
                continue
        self._begin()
