"""The command line as a user meets it: output streams, exit codes, one-line errors, the interactive chat."""

from __future__ import annotations

import json
import os
import pty
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tritonmoe.chat import assistant_message
from tritonmoe.generate import main

COMMAND = [sys.executable, "-m", "tritonmoe.generate"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUNBUFFERED": "1"}


def run(*arguments: str, stdin: bytes = b"", env: dict[str, str] | None = None) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [*COMMAND, *arguments],
        input=stdin,
        capture_output=True,
        env={**ENVIRONMENT, **(env or {})},
        timeout=120,
        check=False,
    )


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The error line of a command that must end with exit code 2, without a traceback or any output."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = [line for line in captured.err.splitlines() if not line.startswith("loaded")]
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("error: ")
    return lines[0]


def test_text_to_stdout_everything_else_to_stderr(pristine_folder: Path) -> None:
    done = run("--model", str(pristine_folder), "Hello", "--max-new-tokens", "5")
    assert done.returncode == 0
    assert b"loaded" in done.stderr
    last = done.stderr.decode().splitlines()[-1]
    assert last.startswith("[prompt 5 tokens, generated 5; first token ")
    assert "tokens/s" in last
    plain = run("--model", str(pristine_folder), "Hello", "--max-new-tokens", "5", "--no-stream")
    assert plain.stdout == done.stdout != b""


def test_prompt_sources_agree(pristine_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("Grüße\r\n", newline="")
    common = ("--model", str(pristine_folder), "--max-new-tokens", "5", "--json")
    results = [
        run(*common, "Grüße"),
        run(*common, "--prompt", "Grüße"),
        run(*common, "--prompt-file", str(tmp_path / "prompt.txt")),
        run(*common, stdin="Grüße".encode()),
        run(*common, stdin="Grüße\n".encode()),
    ]
    ids = [json.loads(done.stdout)["token_ids"] for done in results]
    assert ids == ids[:1] * 5


def test_json_is_one_complete_object(pristine_folder: Path) -> None:
    done = run("--model", str(pristine_folder), "Hello", "--max-new-tokens", "5", "--json", "--seed", "3")
    result = json.loads(done.stdout)
    assert len(done.stdout.splitlines()) == 1
    assert {"text", "token_ids", "finish_reason", "prompt_tokens", "ttft_ms", "tpot_ms", "tokens_per_s"} <= set(result)
    assert (len(result["token_ids"]), result["prompt_tokens"], result["seed"]) == (5, 5, 3)


def test_batch_prints_a_line_per_prompt(pristine_folder: Path) -> None:
    arguments = ("--model", str(pristine_folder), "--json", "--max-new-tokens", "4")
    done = run(*arguments, "--prompt", "one", "--prompt", "two")
    alone = run(*arguments, "two")
    assert [json.loads(line)["prompt_tokens"] for line in done.stdout.splitlines()] == [3, 3]
    assert json.loads(done.stdout.splitlines()[1])["token_ids"] == json.loads(alone.stdout)["token_ids"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--bogus"], "unrecognized arguments: --bogus"),
        (["--max-new-tokens", "many", "x"], "invalid int value: 'many'"),
        (["--max-new-tokens", "-5", "x"], "--max-new-tokens must be"),
        (["--max-new-tokens", "99999999999", "x"], "--max-new-tokens must be"),
        (["--temperature", "-1", "x"], "--temperature must be"),
        (["--top-p", "0", "x"], "--top-p must be"),
        (["--top-k", "-2", "x"], "--top-k must be"),
        (["--seed", "-2", "x"], "--seed must be"),
        (["--max-context", "0", "x"], "--max-context must be"),
        (["--stop", "", "x"], "--stop must be"),
        (["", "--max-new-tokens", "3"], "the prompt is empty"),
        (["x", "--prompt", "y"], "give the prompt once"),
        (["x", "--top-k", "5"], "--top-k has no effect on greedy decoding"),
        (["x", "--chat", "--system", "\udcff"], "--system is not valid UTF-8"),
        (["x", "--system", "be good"], "--system needs --chat"),
        (["--prompt-file", "/nonexistent/prompt"], "--prompt-file /nonexistent/prompt: No such file"),
        (["bad \udcff byte"], "not valid UTF-8"),
        (["x", "--device", "cuda:99"], "there is no such GPU here"),
        (["x", "--dtype", "int1"], "--dtype 'int1' is not supported"),
        (["x", "--device", "cpu", "--expert-dtype", "q4"], "--expert-dtype 'q4' is not known; use one of published"),
        (["x", "--device", "cpu", "--dense-dtype", "int4"], "--dense-dtype 'int4' is not known; use published, fp8"),
    ],
)
def test_bad_options(
    arguments: list[str], message: str, pristine_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(capsys, "--model", str(pristine_folder), *arguments)


def test_forms_of_weights(
    pristine_folder: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The same text wherever experts of a form live; the table names it."""
    texts = []
    for place in (["--policy", "resident"], ["--policy", "on-demand", "--expert-slots", "3"]):
        forms = ["--expert-dtype", "int4", "--dense-dtype", "int8", "--gpu-memory", "auto"]
        arguments = ["--model", str(pristine_folder), "--device", "cpu", "Hello", "--max-new-tokens", "5", *forms]
        assert main([*arguments, *place]) == 0
        texts.append(capsys.readouterr().out)
    assert "all 8 experts in int4" in caplog.text
    assert "3 expert slots of 1.25 KiB in int4" in caplog.text
    assert caplog.text.count("weights without experts, most in int8") == 2
    assert texts[0] == texts[1] != "\n"


def test_prompt_longer_than_the_context(pristine_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "leaves no room in the context of 128" in refused(capsys, "--model", str(pristine_folder), "x" * 130)


def test_prompt_file_not_utf8(pristine_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prompt").write_bytes(b"ab\xff")
    line = refused(capsys, "--model", str(pristine_folder), "--prompt-file", str(tmp_path / "prompt"))
    assert "is not UTF-8 (byte 2)" in line


def test_bad_models(model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no such folder" in refused(capsys, "--model", str(tmp_path / "absent") + "/", "x")
    (tmp_path / "empty").mkdir()
    assert "config.json" in refused(capsys, "--model", str(tmp_path / "empty"), "x")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert "only safetensors are read" in refused(capsys, "--model", str(tmp_path / "model.gguf"), "x")
    weights = model_folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    assert "truncated" in refused(capsys, "--model", str(model_folder), "x")
    (model_folder / "config.json").write_text("{")
    assert "not valid JSON" in refused(capsys, "--model", str(model_folder), "x")


def test_hub_id_without_network(tmp_path: Path) -> None:
    done = run("--model", "org/absent", "x", env={"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path)})
    assert done.returncode == 2
    assert done.stderr.decode().count("\n") == 1
    assert b"HF_HUB_OFFLINE" in done.stderr


def test_out_of_memory_while_running(
    pristine_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 7 bytes.")

    monkeypatch.setattr("tritonmoe.model.decoder.attention_block", fail)
    line = refused(capsys, "--model", str(pristine_folder), "x", "--no-stream")
    assert "out of memory" in line
    assert "you tried to allocate 7 bytes" in line


@pytest.mark.parametrize(
    ("shell", "code", "message"),
    [
        (">/dev/full", 2, "the output cannot be written: No space left on device"),
        (">&-", 0, None),
        ("--json >&-", 0, None),
        ("2>&-", 0, None),
    ],
)
def test_unusual_streams(pristine_folder: Path, shell: str, code: int, message: str | None) -> None:
    command = f"{shlex.join([*COMMAND, 'hi', '--max-new-tokens', '3', '--model', str(pristine_folder)])} {shell}"
    done = subprocess.run(
        ["bash", "-c", command], stdin=subprocess.DEVNULL, capture_output=True, env=ENVIRONMENT, timeout=60, check=False
    )
    assert done.returncode == code, done.stderr
    assert b"Traceback" not in done.stderr
    if message is not None:
        assert message in done.stderr.decode()


def test_stdin_closed() -> None:
    command = f"{shlex.join(COMMAND)} <&-"
    done = subprocess.run(["bash", "-c", command], capture_output=True, env=ENVIRONMENT, timeout=60, check=False)
    assert done.returncode == 2
    assert b"no prompt" in done.stderr


def test_ctrl_c_while_torch_is_imported() -> None:
    process = subprocess.Popen(
        [*COMMAND, "x"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT
    )
    while "libtorch_cpu" not in Path(f"/proc/{process.pid}/maps").read_text():
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, b"")
    assert b"Traceback" not in err


def test_ctrl_c_with_json_prints_what_there_is() -> None:
    process = subprocess.Popen(
        [*COMMAND, "Once upon a time", "--json", "--max-new-tokens", "900", "--temperature", "1"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
    )
    assert process.stderr is not None
    assert b"loaded" in process.stderr.readline()
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    result = json.loads(out)
    assert result["finish_reason"] == "interrupted"
    assert result["text"]


def test_channels_go_back_apart() -> None:
    text = "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant<|channel|>final<|message|>Hello.<|return|>"
    assert assistant_message(text) == {"role": "assistant", "content": "Hello.", "thinking": "Think."}
    assert assistant_message("plain <b>") == {"role": "assistant", "content": "plain <b>"}
    assert assistant_message(text[:40])["content"] == ""


def test_help_documents_exit_codes() -> None:
    done = run("--help")
    assert done.returncode == 0
    assert b"exit codes:" in done.stdout


def test_closed_pipe_is_quiet(pristine_folder: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, "--model", str(pristine_folder), "Hello", "--max-new-tokens", "100"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert b"Traceback" not in process.stderr.read()
    assert process.wait(timeout=60) == 0


class Terminal:
    """A command that believes to talk to a person."""

    def __init__(self, *arguments: str) -> None:
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [*COMMAND, *arguments], stdin=slave, stdout=slave, stderr=slave, env=ENVIRONMENT, start_new_session=True
        )
        os.close(slave)
        self.output = ""

    def wait_for(self, text: str, seconds: float = 60.0) -> str:
        """Everything printed since the last wait, up to and including `text`."""
        deadline = time.monotonic() + seconds
        while text not in self.output:
            assert time.monotonic() < deadline, f"no {text!r} in {self.output!r}"
            try:
                self.output += os.read(self.master, 4096).decode(errors="replace")
            except OSError:
                raise AssertionError(f"ended without {text!r}: {self.output!r}") from None
        before, _, self.output = self.output.partition(text)
        return before + text

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())


def test_interactive_chat_reuses_its_cache(pristine_folder: Path) -> None:
    terminal = Terminal("--model", str(pristine_folder), "--chat", "--max-new-tokens", "6")
    terminal.wait_for("> ")
    terminal.type("hello\n")
    assert ", 0 reused" in terminal.wait_for("tokens/s]")
    terminal.wait_for("> ")
    terminal.type("more\n")
    status = terminal.wait_for("tokens/s]")
    assert ", 0 reused" not in status
    terminal.wait_for("> ")
    terminal.type("x" * 200 + "\n")
    assert "leaves no room" in terminal.wait_for("--max-context")
    os.write(terminal.master, b"caf\xe9\n")
    assert "error:" in terminal.wait_for("not valid Unicode")
    terminal.type("/exit\n")
    assert terminal.process.wait(timeout=30) == 0


def test_ctrl_c_ends_a_generation_cleanly() -> None:
    """With the embedded model, whose context takes seconds to fill."""
    terminal = Terminal("Once upon a time", "--max-new-tokens", "900", "--temperature", "1")
    terminal.wait_for("there")
    os.killpg(terminal.process.pid, signal.SIGINT)
    assert "tokens/s; ended by interrupted]" in terminal.wait_for("ended by interrupted]")
    assert terminal.process.wait(timeout=30) == 130
