"""Run tasks of EleutherAI's lm_eval on a model under any policy: GSM8K, HumanEval and the rest, or tasks of your own.

  python tools/evaluate_lm.py Qwen/Qwen3-30B-A3B --tasks gsm8k --policy est-pf --expert-slots 25%

Needs the extra `eval`. Continuations are scored in decode steps, where policies act; under an exact policy as prompts,
which is faster and gives the same.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from command_line import Parser, run_command
from prediction.policies import Asked
from prediction.scoring import Pair, score
from provenance import provenance

from tritonmoe import Engine, SamplingParams
from tritonmoe.errors import InputError
from tritonmoe.placement.loader import Placement

try:
    from lm_eval import evaluator, utils  # pyright: ignore[reportMissingImports]
    from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]
    from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise SystemExit(f"error: lm_eval cannot be imported ({error}); pip install 'tritonmoe[eval]'") from None

NEW_TOKENS = 256  # where a task does not say


class PolicyModel(TemplateLM):
    """A model of the harness: an engine, whose policy acts on whatever it generates and scores."""

    def __init__(self, engine: Engine, batch: int, by_steps: bool) -> None:
        super().__init__()
        self._engine, self._batch, self._by_steps = engine, batch, by_steps

    @property
    def eot_token_id(self) -> int:
        """What separates texts, and stands before a text that has no context."""
        tokenizer = self._engine.tokenizer
        found = None if tokenizer.eos_token is None else tokenizer.token_to_id(tokenizer.eos_token)
        if found is None:
            raise InputError("the model's tokenizer names no end-of-text token, which scoring without context needs")
        return found

    @property
    def tokenizer_name(self) -> str:
        return self._engine.decoder.spec.model_type

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        template = self._engine.chat_template
        return template.render(chat_history, add_generation_prompt=add_generation_prompt)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        return self._engine.tokenizer.encode(string, add_special_tokens=bool(add_special_tokens))

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        return [tuple(found) for found in self._scores([Pair(*ids) for _, *ids in requests])]

    def _scores(self, pairs: list[Pair]) -> list[Any]:
        """Contexts lose their beginning where they are too long."""
        limit = self._engine.max_context
        kept = [Pair(list(context)[len(ids) - limit :] if len(context) + len(ids) > limit else context, ids)
                for context, ids in pairs]  # fmt: skip
        short = [len(ids) for (context, ids) in kept if not context]
        if short:
            raise InputError(f"a continuation of {short[0]} tokens leaves no room for a context in {limit}")
        return score(self._engine, kept, self._batch, self._by_steps)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Of whole texts, in windows of the model's context."""
        parts = [
            [
                Pair(*utils.make_disjoint_window(window))
                for window in utils.get_rolling_token_windows(
                    self.tok_encode(request.args[0]), self.prefix_token_id, self._engine.max_context - 1, 1
                )
            ]
            for request in requests
        ]
        scores = iter(self._scores([pair for windows in parts for pair in windows]))
        return [sum(next(scores).log_probability for _ in windows) for windows in parts]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        asked = [(request.args[0], self._params(request.args[1])) for request in requests]
        order = sorted(range(len(asked)), key=lambda i: (repr(asked[i][1]), len(asked[i][0]), i))
        found: dict[int, str] = {}
        for _, alike in groupby(order, key=lambda i: repr(asked[i][1])):
            group = list(alike)
            for start in range(0, len(group), self._batch):
                chosen = group[start : start + self._batch]
                params = asked[chosen[0]][1]
                results = self._engine.generate_batch([self._prompt(asked[i][0], params) for i in chosen], params)
                found.update((i, result.text) for i, result in zip(chosen, results, strict=True))
        return [found[i] for i in range(len(asked))]

    def _prompt(self, text: str, params: SamplingParams) -> list[int]:
        """The end of the text that leaves room for the answer."""
        room = self._engine.max_context - params.max_new_tokens
        if room < 1:
            raise InputError(f"answers of {params.max_new_tokens} tokens leave no room in {self._engine.max_context}")
        return self._engine.tokenizer.encode(text, add_special_tokens=True)[-room:]

    def _params(self, asked: dict[str, Any]) -> SamplingParams:
        until = asked.get("until") or []
        temperature = float(asked.get("temperature", 0.0)) if asked.get("do_sample", False) else 0.0
        return SamplingParams(
            max_new_tokens=int(asked.get("max_gen_toks", NEW_TOKENS)),
            temperature=temperature,
            stop=tuple([until] if isinstance(until, str) else until),
        )


def build_parser() -> Parser:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("model", metavar="MODEL", help="a folder, a hub id, or 'nano': the embedded model")
    parser.add_argument("--tasks", required=True, metavar="A,B", help="names of tasks")
    parser.add_argument("--include", type=Path, metavar="DIR", help="a folder with tasks of your own")
    parser.add_argument("--policy", default=None, help="a preset with options, as for tools/evaluate.py")
    parser.add_argument("--expert-slots", metavar="N|P%%", help="experts to hold on the device")
    parser.add_argument("--gpu-memory", metavar="SIZE", help="GPU memory to use")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--max-context", type=int, metavar="N", help="tokens of context and answer (default: model)")
    parser.add_argument("--batch", type=int, default=16, metavar="N", help="sequences at once (default: %(default)s)")
    parser.add_argument("--limit", type=int, metavar="N", help="of each task's items")
    parser.add_argument("--fewshot", type=int, metavar="N", help="examples in front of an item (default: the task's)")
    parser.add_argument("--allow-code", action="store_true", help="run code that the model wrote, as HumanEval does")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the results as JSON")
    return parser


def run(options: argparse.Namespace) -> dict[str, Any]:
    placement, is_exact = Placement(gpu_memory=options.gpu_memory, expert_slots=options.expert_slots), True
    if options.policy is not None:
        asked = Asked.parse(options.policy)
        placement = Placement(asked.preset, options.gpu_memory, options.expert_slots, overrides=asked.overrides)
        is_exact = asked.policy.is_exact
    engine = Engine.from_pretrained(
        options.model, dtype=options.dtype, device=options.device, max_context=options.max_context,
        placement=placement, batch_size=options.batch,
    )  # fmt: skip
    found = evaluator.simple_evaluate(
        PolicyModel(engine, options.batch, by_steps=not is_exact),
        tasks=options.tasks.split(","),
        task_manager=TaskManager(include_path=None if options.include is None else str(options.include)),
        num_fewshot=options.fewshot,
        limit=options.limit,
        confirm_run_unsafe_code=options.allow_code,
    )
    engine.close()
    assert found is not None, "the harness gives results to its first process, and this is the only one"
    print(utils.make_table(found))
    results = {"policy": options.policy, "results": found["results"], "items": found.get("n-samples")}
    if options.output is not None:
        content = {"provenance": provenance(), **results}
        options.output.write_text(json.dumps(content, indent=1, default=str) + "\n", encoding="utf-8")
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    logging.basicConfig(level=logging.WARNING)
    return run_command(run, build_parser(), arguments)


if __name__ == "__main__":
    sys.exit(main())
