"""An interactive conversation in the terminal."""

from __future__ import annotations

import sys

from tritonmoe.engine import Engine
from tritonmoe.errors import InputError
from tritonmoe.sampling import SamplingParams
from tritonmoe.session import Session

HELP = "Type a message; /new starts over, /exit or Ctrl-D ends. Ctrl-C stops an answer."


def chat(engine: Engine, params: SamplingParams, system: str | None) -> int:
    """Read messages from the terminal until end of file; the KV cache of the common prefix is reused."""
    start = [] if system is None else [{"role": "system", "content": system}]
    messages = list(start)
    session = engine.session()
    print(HELP, file=sys.stderr)
    while True:
        try:
            print("> ", end="", file=sys.stderr, flush=True)  # input() would put it among the answers on stdout
            text = input().strip()
        except EOFError:
            print(file=sys.stderr)
            return 0
        except KeyboardInterrupt:
            print(file=sys.stderr)
            continue
        if text in ("/exit", "/quit"):
            return 0
        if text == "/new":
            messages = list(start)
        elif text:
            _turn(engine, params, session, messages, text)


def _turn(engine: Engine, params: SamplingParams, session: Session, messages: list[dict[str, str]], text: str) -> None:
    """Answer one message. The history grows only by what was really said; a refused message leaves it as it was."""
    asked = [*messages, {"role": "user", "content": text}]
    try:
        stream = engine.stream(engine.chat_prompt(asked), params, session)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return
    try:
        for piece in stream:
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        print(" [stopped]", end="", file=sys.stderr)
    print(flush=True)
    result = stream.result()
    messages[:] = [*asked, {"role": "assistant", "content": result.text}]
    print(
        f"[{result.prompt_tokens} tokens of conversation, {result.reused_tokens} reused; "
        f"{result.tokens_per_s:.1f} tokens/s]",
        file=sys.stderr,
    )
