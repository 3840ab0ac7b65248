"""Tasks of lm_eval through the engine, each kind of request, on the embedded model; skipped where it is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("lm_eval")

import evaluate_lm

from nano.tasks import read_test_file
from tritonmoe.engine import embedded_folder

TASKS = {
    "answers": """\
output_type: generate_until
doc_to_text: "{{prompt}}"
doc_to_target: "{{final}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 24, do_sample: false}
filter_list:
  - name: final
    filter:
      - {function: regex, regex_pattern: "Answer: (.*)"}
      - {function: take_first}
metric_list:
  - {metric: exact_match}
""",
    "choices": """\
output_type: multiple_choice
doc_to_text: "{{prompt}}Answer:"
doc_to_choice: ["{{final}}", "{{wrong}}"]
doc_to_target: 0
metric_list:
  - {metric: acc}
""",
    "texts": """\
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{prompt}}"
metric_list:
  - {metric: bits_per_byte}
""",
}


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    items = read_test_file(embedded_folder() / "tasks/lookup-easy.jsonl")[:6]
    rows = [{"prompt": item.prompt, "final": item.final, "wrong": item.final + "7"} for item in items]
    (tmp_path / "items.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, body in TASKS.items():
        data = f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {tmp_path}/items.jsonl}}}}\n"
        (tmp_path / f"{name}.yaml").write_text(f"{data}test_split: test\n{body}")
    return tmp_path


def results(tasks: Path, *options: str) -> dict[str, dict[str, float]]:
    parsed = evaluate_lm.build_parser().parse_args(
        ["nano", "--tasks", ",".join(TASKS), "--include", str(tasks), "--batch", "4", "--device", "cpu", *options]
    )
    return evaluate_lm.run(parsed)["results"]


def test_exact_and_speculated_policies(tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    resident = results(tasks)
    assert resident["answers"]["exact_match,final"] >= 5 / 6
    assert resident["choices"]["acc,none"] == 1.0
    bits = resident["texts"]["bits_per_byte,none"]
    assert 0.5 < bits < 4
    exact = results(tasks, "--policy", "on-demand", "--expert-slots", "30%")
    assert exact["answers"] == resident["answers"]
    assert exact["texts"]["bits_per_byte,none"] == pytest.approx(bits, rel=1e-5)
    guessed = results(tasks, "--policy", "est-pf", "--expert-slots", "100%")["texts"]["bits_per_byte,none"]
    assert guessed != pytest.approx(bits, rel=1e-5), "the policy acts on what is scored"
    assert guessed == pytest.approx(bits, rel=0.2)
