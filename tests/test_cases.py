"""The case runner: the copied cases pass, no expectation is ignored, and a bad file is told what is wrong with it."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cases import processes
from tests.cases.__main__ import main
from tests.cases.case import Verdict
from tests.cases.checks import make
from tests.cases.kinds import run_file
from tests.cases.models import Models
from tests.cases.offline import ask

HERE = Path(__file__).parent
COPIED = sorted((HERE / "cases").glob("*.json"))
OTHERWISE = {
    "t08-reasoning-in-history": ("not run", "needs /v1/responses, which is not there yet: same_prompt_from"),
    "b07-json-schema-missing": ("not run", "needs /v1/responses, which is not there yet (2 of 2 checks pass)"),
    "p06-midstream-error": ("not run", "needs /v1/responses, which is not there yet (4 of 4 checks pass)"),
}


@pytest.fixture(scope="module")
def models() -> Iterator[Models]:
    with Models() as made:
        yield made


def case_data(name: str) -> dict[str, Any]:
    (path,) = (HERE / "cases").glob(f"{name}*.json")
    return json.loads(path.read_text())


def told(data: Any, models: Models, folder: Path) -> Verdict:
    """The verdict on a file with this content."""
    path = folder / "x01-made.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return run_file(path, models)


@pytest.mark.parametrize("path", COPIED, ids=lambda path: path.stem)
def test_copied_cases(models: Models, path: Path) -> None:
    got = run_file(path, models)
    status, why = OTHERWISE.get(path.stem, ("pass", ""))
    assert (got.status, got.id) == (status, path.stem) and got.why.startswith(why), str(got)


# changing these can make nothing fail: remarks, limits of time, and what must be absent (tested below)
SLOW = ("l03-shutdown", "l05-offline-start")  # they start servers; what their checks find wrong is tested below
FREE = {"check", "note", "within_s", "content_not_contains", "no_tool_name_contains"}
ABSENT = {"prompt_not_contains", "prompt_ids_not_contain_inside_content", "or"}


def otherwise(value: Any) -> Any:
    match value:
        case bool():
            return not value
        case int():
            return value + 1
        case str():
            return f"{value} not so"
        case list():
            return ["not so"]
    return {"not": "so"}


@pytest.mark.parametrize("path", [path for path in COPIED if path.stem not in SLOW], ids=lambda path: path.stem)
def test_every_expectation_counts(models: Models, path: Path, tmp_path: Path) -> None:
    """A checker that skips what it does not understand calls everything a pass."""
    data, plain = case_data(path.stem), run_file(path, models)
    for request in data["input"].get("requests", []) if "inject" not in data["input"] else ():
        request["json"]["max_tokens"] = 1  # for speed: no check here is about its length
    for number, entry in enumerate(data["expect"]):
        for key in entry.keys() - FREE:
            if entry["check"] in ABSENT:
                continue
            changed = copy.deepcopy(data)
            changed["expect"][number][key] = otherwise(entry[key])
            got = told(changed, models, tmp_path)
            assert got.status in ("fail", "not run") and got.why != plain.why, (key, str(got))
        changed = copy.deepcopy(data)
        changed["expect"][number]["surprise"] = 1
        if entry["check"] != "or":
            assert told(changed, models, tmp_path).status == "not run"


@pytest.mark.parametrize(
    ("name", "check", "word"),
    [
        ("h12", {"check": "parsed", "reasoning": "Planned."}, "reasoning is 'Plan.', want 'Planned.'"),
        ("h12", {"check": "parsed", "content_not_contains": ["check"]}, "which has ['check']"),
        ("h12", {"check": "parsed", "no_tool_name_contains": "weather"}, "which has ['weather']"),
        ("h12", {"check": "when", "request_field": "tool_choice=none", "tool_calls": 1}, "tool_calls is 0"),
        ("h06", {"check": "same_result_for_all_sequences"}, "sequence 1 against 0: reasoning is"),
        ("h16", {"check": "never", "what": "lost call"}, "lost call"),
        ("t08", {"check": "prompt_not_contains", "value": "LIVE-THOUGHT"}, "is in"),
        ("t08", {"check": "prompt_contains", "value": "LIVE-THOUGHT", "channel": "final"}, "on channel final"),
        ("p12", {"check": "prompt_ids_not_contain_inside_content", "ids": [91]}, "is not the content"),
        ("t06", {"check": "sse_content_concat", "equals": "Let me"}, "'Let me check.', want 'Let me'"),
        ("t06", {"check": "status", "equals": 400}, "request 0 gave 200"),
        ("b01", {"check": "never", "what": "5xx or a hang"}, ""),
    ],
)
def test_a_wrong_expectation_fails_and_shows_got_and_want(
    models: Models, tmp_path: Path, name: str, check: dict[str, Any], word: str
) -> None:
    got = told(case_data(name) | {"expect": [check]}, models, tmp_path)
    assert got.status == ("fail" if word else "pass") and word in got.why, str(got)


def test_what_cannot_be_checked_is_never_a_pass(models: Models, tmp_path: Path) -> None:
    data = case_data("h12")
    for check in (
        {"check": "parsed", "colour": "red"},
        {"check": "sparkles"},
        {"check": "never", "what": "bad weather"},
        {"check": "when", "request_field": "stream=true", "tool_calls": 1},
    ):
        got = told(data | {"expect": [*data["expect"], check]}, models, tmp_path)
        assert got.status == "not run" and got.why.startswith("unknown check"), str(got)
        wrong = {"check": "parsed", "content": "no"}
        assert told(data | {"expect": [check, wrong]}, models, tmp_path).status == "fail", "a failure counts for more"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"kind": "telepathy"}, "unknown kind 'telepathy'"),
        ({"kind": "process"}, "unknown input: neither steps nor an environment among start_role, sequences"),
        ({"kind": "process", "input": {"steps": ["pull the plug"]}}, "unknown step 'pull the plug'"),
        ({"kind": "process", "input": {"environment": {"HOME": "none"}}}, "unknown environment 'HOME': 'none'"),
        ({"kind": "http", "needs": "gpt_oss"}, "needs gpt_oss weights"),
        ({"kind": "python", "needs": "gpt_oss"}, "needs gpt_oss weights"),
        ({"kind": "python", "needs": "any_model", "input": {"lengths": [1]}}, "unknown input: no json body among lengths"),
        (
            {"kind": "http_each", "needs": "scripted_model", "input": {"inject": "raise"}},
            "unknown input.inject 'raise'",
        ),
    ],
)
def test_what_is_missing_is_named(models: Models, tmp_path: Path, changes: dict[str, Any], why: str) -> None:
    got = told(case_data("h12") | changes, models, tmp_path)
    assert (got.status, got.why) == ("not run", why)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a JSON object"),
        ({"id": "a"}, "has no 'kind'"),
        ({"id": 5, "kind": "render", "needs": "none", "input": {}, "expect": []}, "'id' is 5, not a str"),
        (
            {"id": "a", "kind": "render", "needs": "luck", "input": {}, "expect": [{}]},
            "needs 'luck', which is not one of none,",
        ),
        ({"id": "a", "kind": "render", "needs": "none", "input": {}, "expect": []}, "expects nothing"),
        ({"id": "a", "kind": "render", "needs": "none", "input": {}, "expect": [{"equals": 1}]}, "expect[0] names no check"),
        (
            {"id": "a", "kind": "harmony_tokens", "needs": "none", "input": {}, "expect": [{"check": "parsed"}]},
            "the runner cannot read its input or checks: KeyError('sequences')",
        ),
    ],
)
def test_a_bad_file_fails_and_says_why(models: Models, tmp_path: Path, content: Any, why: str) -> None:
    got = told(content, models, tmp_path)
    assert got.status == "fail" and why in got.why, str(got)


def test_python_cases_run_request_bodies(models: Models, tmp_path: Path) -> None:
    """The same body may be scripted or drawn by the tiny model; a crash is a 500, not a pass."""
    script = models.tokenizer.encode("final") + [200008] + models.tokenizer.encode("Yes.") + [200002]
    data = {"id": "a", "kind": "python", "needs": "scripted_model", "expect": [{"check": "content", "equals": "Yes."}]}
    data["input"] = {"json": {"messages": [{"role": "user", "content": "?"}]}, "scripted_output_ids": [200005, *script]}
    assert told(data, models, tmp_path).status == "pass"
    drawn = {"json": {"prompt": ["a", "b"], "max_tokens": 2, "ignore_eos": True, "temperature": 0}}
    data |= {"needs": "any_model", "input": drawn, "expect": [{"check": "finish_reason", "equals": "length"}]}
    assert told(data, models, tmp_path).status == "pass"


GOOD = processes.Ended("two SIGTERM 0.1 s apart", 3.0, 0, 0.1, True)
KILLED = dataclasses.replace(GOOD, step="SIGKILL the HTTP process", code=1)


@pytest.mark.parametrize(
    ("end", "failing"),
    [
        (GOOD, []),
        (KILLED, []),
        (dataclasses.replace(GOOD, seconds=15.1), ["exit_within_s"]),
        (dataclasses.replace(GOOD, left_s=6.0), ["no_child_left_within_s"]),
        (dataclasses.replace(GOOD, left_s=60.0), ["no_child_left_within_s", "device_memory_free"]),
        (dataclasses.replace(GOOD, port_is_free=False), ["port_free"]),
        (dataclasses.replace(GOOD, code=1), ["exit_code_zero_on_sigterm"]),
        (dataclasses.replace(KILLED, code=0), ["exit_code_zero_on_sigterm"]),
    ],
)
def test_what_a_server_leaves_behind_is_found(end: processes.Ended, failing: list[str]) -> None:
    failed, missing = make(case_data("l03")["expect"], processes._end_checks([end]))
    assert [problem.partition(":")[0] for problem in failed] == failing and not missing


def test_a_stream_that_is_cut_off_is_told_from_a_whole_one() -> None:
    done = "data: [DONE]\n\n"
    whole, error = 'data: {"finish_reason":"length"}\n\n' + done, 'data: {"error":{"message":"m"}}\n\n' + done
    assert [processes._is_whole(text) for text in (whole, error, whole[:-8])] == [True, False, False]
    assert [processes._is_error(text) for text in (whole, error, error[:-8])] == [False, True, False]


@pytest.mark.parametrize("ask", ["socket.create_connection(('192.0.2.1', 80))", "socket.getaddrinfo('example.org', 80)"])
def test_without_a_network_whatever_is_asked_of_it_fails_and_is_noted(tmp_path: Path, ask: str) -> None:
    environment, _ = processes._environments(case_data("l05")["input"]["environment"], tmp_path)
    given = {name: value for name, value in (os.environ | environment).items() if value is not None}
    ran = subprocess.run([sys.executable, "-c", f"import socket; {ask}"], env=given, capture_output=True, text=True)
    assert "there is no network" in ran.stderr and (tmp_path / "network").read_text().strip()


def test_an_engine_that_fails_in_a_step_is_a_500() -> None:
    with Models() as own:
        own.scripted.play([200005, RuntimeError("injected")])
        answered = ask(own.scripted, {"json": {"messages": [{"role": "user", "content": "?"}], "stream": True}})
    assert answered.status == 500 and "RuntimeError: injected" in answered.error


def test_the_command(tmp_path: Path) -> None:
    good, bad = tmp_path / "h12.json", tmp_path / "bad.json"
    good.write_text(json.dumps(case_data("h12")))
    (tmp_path / "_format.json").write_text("{}")
    bad.write_text(json.dumps(case_data("h12") | {"id": "bad", "expect": [{"check": "parsed", "content": "no"}]}))
    command = [sys.executable, "-m", "tests.cases", str(tmp_path), str(good)]
    done = subprocess.run(command, cwd=HERE.parent, capture_output=True, text=True, timeout=120)
    lines = [
        "fail     bad: parsed: sequence 0: content is 'Let me check.', want 'no'",
        "pass     h12-preamble-then-call",
        "pass     h12-preamble-then-call",
    ]
    assert (done.returncode, done.stdout.splitlines()) == (1, lines), done.stderr
    assert done.stderr == "1 fail, 2 pass\n"


def test_the_command_refuses_what_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == main([str(tmp_path / "nowhere")]) == main([str(tmp_path)]) == 2
    told = capsys.readouterr()
    assert told.out == "" and "nowhere does not exist" in told.err and "no *.json in" in told.err
