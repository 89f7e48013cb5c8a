# SPDX-License-Identifier: Apache-2.0
"""One GGUF file on the CPU, read and continued by transformers, by rooftile and by what else is installed, in turns.

A turn writes greedy tokens after the prompt, and each engine says when it had each of them. Until the first one is the
time of the prompt, from there to the last one that of decode steps. Every engine gets the same prompt and as many
threads, all models stay in memory, and a ratio is the median of the rounds' ratios, so that a machine that slows down
for a while slows both sides. A peer has a process of its own: one that dies is noted, and the others' rows remain.
"""

import contextlib
import multiprocessing
import statistics

import torch

from rooftile.bench import e2e
from rooftile.bench.e2e import Clock

YARDSTICK = "transformers"
ROWS = {  # name: arguments of rt.accelerate, or None
    YARDSTICK: None,
    "W4A16 + bf16, 8-bit head": {"weights": "w4a16", "kv_cache": "bf16", "head": "w8a16"},
    "W4A16 + int4-kivi, 8-bit head": {"weights": "w4a16", "kv_cache": "int4-kivi", "head": "w8a16"},
}


class Model:
    """A row of ROWS. write(ids, count): (the greedy tokens after a prompt, when each of them came), lists of `count`
    ints and seconds.
    """

    variant = ""

    def __init__(self, options, path, threads, context):  # the threads are torch's
        self.model = e2e.stored_model(path, "cpu", e2e.Row(options))
        e2e.check_length(self.model.config, context, "--prompt, --tokens")

    def write(self, ids, count):
        prompt, clock = torch.tensor([ids]), Clock()
        ending = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": count}
        out = self.model.generate(prompt, attention_mask=torch.ones_like(prompt), streamer=clock, **ending)
        return out[0, len(ids) :].tolist(), clock.at[1:]  # the prompt comes first


class LlamaCpp:
    """llama.cpp, as its Python package llama-cpp-python was built."""

    def __init__(self, path, threads, context):
        import llama_cpp

        found = llama_cpp.llama_print_system_info().decode()
        flags = [part.strip().split(" = ") for part in found.replace(":", "|").split("|")]
        names = [flag[0] for flag in flags if len(flag) == 2 and flag[1] == "1" and flag[0] in _FLAGS]
        self.variant = " ".join([llama_cpp.__version__, *names])
        self.model = llama_cpp.Llama(path, n_ctx=context, n_threads=threads, n_threads_batch=threads, verbose=False)

    def write(self, ids, count):
        found, clock = [], Clock()
        self.model.reset()  # or it keeps what it has of the prompt
        for token in self.model.generate(ids, temp=0.0, repeat_penalty=1.0):
            found.append(token)
            clock.put()
            if len(found) == count:
                return found, clock.at


_FLAGS = ("AVX2", "AVX512", "AVX512_VNNI", "AVX512_BF16", "AMX_INT8", "REPACK")  # what its products may use


class OpenVino:
    """OpenVINO GenAI, whose reader of GGUF files keeps their codes."""

    def __init__(self, path, threads, context):
        import openvino
        import openvino_genai

        self.api, self.tensor, self.variant = openvino_genai, openvino.Tensor, openvino_genai.__version__.split("-")[0]
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False  # or it keeps what it has of the prompt
        self.pipeline = openvino_genai.LLMPipeline(
            path, "CPU", INFERENCE_NUM_THREADS=threads, scheduler_config=scheduler
        )

    def write(self, ids, count):
        prompt, clock = torch.tensor([ids]), Clock()
        given = self.api.TokenizedInputs(self.tensor(prompt.numpy()), self.tensor(torch.ones_like(prompt).numpy()))
        config = self.api.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = count, True, False
        return list(self.pipeline.generate(given, config, self._streamer(clock)).tokens[0]), clock.at

    def _streamer(self, clock):
        going_on = self.api.StreamingStatus.RUNNING

        class Streamer(self.api.StreamerBase):
            def write(self, tokens):
                for _ in tokens if isinstance(tokens, list) else (tokens,):
                    clock.put()
                return going_on

            def end(self):
                pass

        return Streamer()


PEERS = {"llama.cpp": LlamaCpp, "openvino": OpenVino}


def _serve(pipe, make, arguments):
    """The process of a peer: answers with its variant, then each call of write(). What is raised is sent as it is."""
    try:
        engine = make(*arguments)
        pipe.send(engine.variant)
        while call := pipe.recv():
            pipe.send(engine.write(*call))
    except EOFError:  # nobody asks any more
        pass
    except Exception as e:  # a peer may raise anything, also what cannot be pickled
        pipe.send(RuntimeError(f"{type(e).__name__}: {e}"))


class Apart:
    """An engine in a process of its own. Raises RuntimeError with what it raised, or that it is gone."""

    def __init__(self, make, *arguments):
        spawn = multiprocessing.get_context("spawn")
        self.pipe, end = spawn.Pipe()
        self.process = spawn.Process(target=_serve, args=(end, make, arguments), daemon=True)
        self.process.start()
        end.close()
        self.variant = self._answer()

    def write(self, *call):
        self.pipe.send(call)
        return self._answer()

    def _answer(self):
        try:
            answer = self.pipe.recv()
        except EOFError:
            self.process.join()
            raise RuntimeError(f"its process ended with exit code {self.process.exitcode}") from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self):
        self.pipe.close()
        self.process.terminate()


def prompt_of(path, tokens):
    """The first tokens of the demo's text, by a file's tokenizer. Raises ArgumentError if there are fewer."""
    from rooftile.errors import ArgumentError
    from rooftile.loaders import demo_text, load_tokenizer

    ids = load_tokenizer(path)(demo_text()[: 16 * tokens], verbose=False)["input_ids"][:tokens]
    if len(ids) < tokens:
        raise ArgumentError(f"--prompt: the text has {len(ids)} tokens, expected at least {tokens}")
    return ids


def opened(path, peers, threads, context, notes, stack, advance=lambda: None):
    """{name: engine}. peers: names of PEERS; one that is not installed, or does not take this file, is noted.

    stack: a contextlib.ExitStack, which ends the peers' processes.
    """
    engines = {}
    for name, options in ROWS.items():
        engines[name] = Model(options, path, threads, context)
        advance()
    for name in peers:
        with notes.guarded("every case", name):
            engines[name] = stack.enter_context(contextlib.closing(Apart(PEERS[name], path, threads, context)))
        advance()
    return engines


def run(engines, ids, tokens, rounds, notes, advance=lambda: None):
    """A row for each engine, of as many rounds as are asked for. tokens: 2 or more. A peer that fails is noted."""
    written = {}
    for name, engine in engines.items():
        with notes.guarded("every case", name) if name in PEERS else contextlib.nullcontext():
            written[name], _ = engine.write(ids, tokens)  # first calls set things up
        advance()
    engines = {name: engines[name] for name in written}
    times = {name: [] for name in engines}
    for _ in range(rounds):
        for name, engine in engines.items():
            times[name].append(engine.write(ids, tokens)[1])
            advance()
    return [_row(name, engines, times, written, len(ids), tokens) for name in engines]


def _row(name, engines, times, written, prompt, tokens):
    def speeds(name):
        """[(tokens of the prompt a second, decode steps a second)] of each round."""
        return [(prompt / at[0], (tokens - 1) / (at[-1] - at[0])) for at in times[name]]

    read, decode = zip(*speeds(name), strict=True)
    against = {
        other: {
            what: statistics.median(a[i] / b[i] for a, b in zip(speeds(name), speeds(other), strict=True))
            for i, what in enumerate(("prompt", "decode"))
        }
        for other in engines
        if other in PEERS and other != name
    }
    pairs = zip(written[name], written[YARDSTICK], strict=False)
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(written[name]))
    return {
        "name": name,
        "variant": engines[name].variant,
        "prompt_tok_s": statistics.median(read),
        "decode_tok_s": statistics.median(decode),
        "ms_per_token": 1e3 / statistics.median(decode),
        "same_tokens": same,  # as transformers writes them, until the first that differs
        "seconds_rounds": times[name],  # when each token came
        "against": against,
    }


def table(rows):
    """What the terminal shows, a rich.table.Table."""
    from rich import box
    from rich.table import Table

    peers = [row["name"] for row in rows if row["name"] in PEERS]
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    shown.add_column("", no_wrap=True)
    titles = ["prompt\ntok/s", "decode\ntok/s", "ms a\ntoken", "tokens as\ntransformers"]
    for title in titles + [f"{what} /\n{peer}" for peer in peers for what in ("prompt", "decode")]:
        shown.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        ratios = [row["against"].get(peer) for peer in peers]
        shown.add_row(
            row["name"],
            f"{row['prompt_tok_s']:.0f}",
            f"{row['decode_tok_s']:.1f}",
            f"{row['ms_per_token']:.2f}",
            str(row["same_tokens"]),
            *(f"{r[what]:.2f}" if r else "" for r in ratios for what in ("prompt", "decode")),
        )
    return shown
