"""An interactive conversation in the terminal."""

from __future__ import annotations

import re
import sys

from tritonmoe.engine import Engine
from tritonmoe.errors import CheckError, TritonMoeError
from tritonmoe.generation.sampling import SamplingParams
from tritonmoe.generation.session import Session

HELP = "Type a message; /new starts over, /exit or Ctrl-D ends. Ctrl-C stops an answer."

# GPT-OSS writes its reasoning and its answer as messages of two channels.
CHANNEL = re.compile(r"<\|channel\|>(\w+)[^<]*<\|message\|>(.*?)(?=<\||$)", re.DOTALL)

# On a terminal these move the cursor, rename the window, write to the clipboard. Lines and tabs are meant.
CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}

Message = dict[str, str]


def emit(text: str, end: str = "") -> None:
    """Print what was generated: to a file or pipe as it is, on a terminal with control characters shown, not obeyed."""
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    print(text.translate(CONTROLS) if is_terminal else text, end=end, flush=True)


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
            messages = _turn(engine, params, session, messages, text)


def _turn(
    engine: Engine, params: SamplingParams, session: Session, messages: list[Message], text: str
) -> list[Message]:
    """Answer one message; returns the conversation with what was really said: a message that was refused, or
    stopped before a token came, leaves it as it was."""
    asked = [*messages, {"role": "user", "content": text}]
    try:
        stream = engine.stream(engine.chat_prompt(asked), params, session)
        try:
            for piece in stream:
                emit(piece)
        except KeyboardInterrupt:
            print(" [stopped]", end="", file=sys.stderr)
    except CheckError:
        print(flush=True)
        raise
    except TritonMoeError as error:
        print(f"error: {error}", file=sys.stderr)
        return messages
    print(flush=True)
    result = stream.result()
    print(
        f"[{result.prompt_tokens} tokens of conversation, {result.reused_tokens} reused; "
        f"{result.tokens_per_s:.1f} tokens/s]",
        *engine.report(),
        sep="\n",
        file=sys.stderr,
    )
    return [*asked, assistant_message(result.text)] if result.token_ids else messages


def assistant_message(text: str) -> Message:
    """An answer as chat templates want it back: reasoning and answer apart where the model writes channels."""
    channels = dict(CHANNEL.findall(text))
    if not channels:
        return {"role": "assistant", "content": text}
    message = {"role": "assistant", "content": channels.pop("final", "")}
    return {**message, "thinking": "\n".join(channels.values())} if channels else message
