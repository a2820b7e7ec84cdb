"""The judge, against a real HTTP server on this machine."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from surefoot.config.rewards import JudgeReward
from surefoot.rewards import judge as judge_module
from surefoot.rewards.judge import render
from surefoot.rewards.runner import RewardRunner
from tests.rewards.helpers import config, item, rewards_of, rollout, score, scores


class Server:
    """Answers chat completions with what `reply(question, attempt)` returns: text, a status, or bytes to send raw."""

    def __init__(self, reply: Callable[[str, int], Any]) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.at_once = self.most_at_once = 0
        lock, seen = threading.Lock(), {}
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                question = body["messages"][-1]["content"]
                with lock:
                    server.bodies.append(body)
                    server.headers.append(dict(self.headers))
                    server.paths.append(self.path)
                    server.at_once += 1
                    server.most_at_once = max(server.most_at_once, server.at_once)
                    attempt = seen[question] = seen.get(question, -1) + 1
                answer = reply(question, attempt)
                with lock:
                    server.at_once -= 1
                status, text = (answer, b"busy") if isinstance(answer, int) else (200, answer)
                if isinstance(text, str):
                    text = json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]}).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_: object) -> None:
                pass

        class Quiet(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 64

            def handle_error(self, *_: object) -> None:
                pass

        self._server = Quiet(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Server]]:
    monkeypatch.setattr(judge_module, "FIRST_PAUSE", 0.02)
    servers: list[Server] = []

    def start(reply: Callable[[str, int], Any]) -> Server:
        servers.append(Server(reply))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def spec(server: Server, **keys: Any) -> dict[str, Any]:
    return {"type": "judge", "base_url": server.url, "model": "m", "prompt": "Rate: {response}", **keys}


def test_the_last_number_of_the_reply_is_the_score(serve):
    server = serve(lambda question, _: f"Out of 10, {question[-1]} is what I give: {question[-1]}/")
    assert scores(score(config(spec(server, scale=10)), [rollout("a 7"), rollout("b 3")])) == [0.7, 0.3]
    assert server.paths == ["/v1/chat/completions"] * 2
    assert {b["model"] for b in server.bodies} == {"m"}
    assert all(b["temperature"] == 0 and b["max_tokens"] == 256 for b in server.bodies)


def test_a_pattern_with_a_group(serve):
    server = serve(lambda *_: "score: 3, of 5. score: -2.5 done 9")
    assert scores(score(config(spec(server, pattern=r"score: (-?[\d.]+)")), [rollout("x")])) == [-2.5]


def test_requests_are_made_at_once_and_not_more_than_allowed(serve):
    server = serve(lambda *_: time.sleep(0.3) or "1")
    started = time.monotonic()
    found = scores(score(config(spec(server, concurrency=6)), [rollout(str(i)) for i in range(18)]))
    assert found == [1.0] * 18
    assert 1 < server.most_at_once <= 6
    assert time.monotonic() - started < 0.3 * 18 * 0.6  # Three rounds take 0.9 s; one by one it would be 5.4 s.


def test_a_failed_request_is_tried_again(serve):
    def reply(question: str, attempt: int) -> Any:
        return {"Rate: a": [500, 429, "1"], "Rate: b": ["2"], "Rate: c": [503, "3"]}[question][attempt]

    server = serve(reply)
    assert scores(score(config(spec(server)), [rollout(x) for x in "abc"])) == [1.0, 2.0, 3.0]
    assert len(server.bodies) == 6


def test_a_request_that_keeps_failing_costs_its_own_row(serve):
    server = serve(lambda question, _: 500 if question.endswith("bad") else "1")
    first, second = rewards_of(score(config(spec(server, retries=2)), [rollout("bad"), rollout("good")]))
    assert (first.score, second.score) == (None, 1.0)
    assert "3 attempts" in str(first.error)
    assert "status 500" in str(first.error)
    assert len(server.bodies) == 4


def test_refusals_are_not_tried_again(serve):
    server = serve(lambda *_: 401)
    (found,) = rewards_of(score(config(spec(server)), [rollout("x")]))
    assert "status 401" in str(found.error)
    assert len(server.bodies) == 1


def test_a_request_without_an_answer_times_out_and_is_tried_again(serve):
    server = serve(lambda question, attempt: (time.sleep(3) if attempt == 0 else None) or "1")
    started = time.monotonic()
    assert scores(score(config(spec(server, timeout_seconds=0.4)), [rollout("x")])) == [1.0]
    assert time.monotonic() - started < 2.5


def test_a_server_that_is_not_there_costs_the_row(serve):
    server = serve(lambda *_: "1")
    server.close()
    (found,) = rewards_of(score(config(spec(server, retries=1)), [rollout("x")]))
    assert found.score is None
    assert "2 attempts" in str(found.error)


@pytest.mark.parametrize("garbage", [
    "no number", "", b"<html>", b"[]", b'{"choices": []}', b'{"choices": [{"message": {"content": null}}]}',
    b"\xff\xfe",
])  # fmt: skip
def test_garbage_costs_its_own_row(serve, garbage):
    server = serve(lambda question, _: garbage if question.endswith("bad") else "4")
    first, second = rewards_of(score(config(spec(server)), [rollout("bad"), rollout("good")]))
    assert (first.score, second.score) == (None, 4.0)
    assert "ValueError" in str(first.error)


def test_the_key_comes_from_the_environment(serve, monkeypatch: pytest.MonkeyPatch):
    server = serve(lambda *_: "1")
    monkeypatch.setenv("JUDGE_KEY", "secret")
    score(config(spec(server, api_key_env="JUDGE_KEY")), [rollout("x")])
    monkeypatch.delenv("JUDGE_KEY")
    score(config(spec(server, api_key_env="JUDGE_KEY")), [rollout("y")])
    assert [h.get("Authorization") for h in server.headers] == ["Bearer secret", None]


def test_text_that_looks_like_a_field_is_not_filled_in():
    asked = render("{prompt}|{response}|{answer}|{other}", item("show me {answer}", "42", prompt="{response}?"))
    assert asked == "{response}?|show me {answer}|42|{other}"
    several = (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    )
    assert render("{prompt}", item("", messages=several)) == "system: Be brief.\nuser: Hi"
    assert render("{prompt}", item("", prompt="raw", messages=())) == "raw"


def test_one_runner_serves_several_event_loops(serve):
    server = serve(lambda *_: "1")
    with RewardRunner(config(spec(server))) as runner:
        for _ in range(3):
            assert scores(asyncio.run(runner.score([rollout("x"), rollout("y")]))) == [1.0, 1.0]


def test_default_concurrency_is_more_than_one():
    assert JudgeReward(type="judge", base_url="http://x/v1", model="m", prompt="{response}").concurrency > 1
