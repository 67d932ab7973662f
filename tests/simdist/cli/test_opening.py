"""`--open`: a page in the browser, and a timeline that is served to Perfetto once."""

import json
import socket
import threading
import urllib.error
import urllib.request
import webbrowser
from http.server import HTTPServer

import pytest
from commandline import call, write

from simdist.cli import opening


@pytest.fixture
def browsed(monkeypatch):
    """Return the addresses that the browser was asked to open."""
    found: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda address: found.append(address) or True)
    return found


@pytest.fixture
def run(tmp_path, capsys):
    assert call(capsys, "simulate", write(tmp_path / "s.yaml"), "--schedule", "sync", "-o", tmp_path / "run").code == 0
    return tmp_path / "run"


def test_report_opens_the_page_that_it_wrote(run, browsed, tmp_path, capsys):
    page = tmp_path / "a page.html"
    assert call(capsys, "report", run, "-o", page, "--open").code == 0
    assert browsed == [page.resolve().as_uri()]


def test_address_is_told_where_there_is_no_browser(run, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(webbrowser, "open", lambda _: False)
    page = tmp_path / "page.html"
    assert f"no browser found: open {page.resolve().as_uri()}" in call(capsys, "report", run, "-o", page, "--open").err


def test_trace_is_served_to_perfetto_once_and_nothing_else_is(run, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(opening, "_PORT", 0)
    chrome = tmp_path / "a #&%? trace.json"
    answers: list[tuple[str | None, bytes]] = []
    fetching: list[threading.Thread] = []
    servers: list[opening._OneFile] = []

    class Known(opening._OneFile):
        def __init__(self, *given):
            super().__init__(*given)
            servers.append(self)

    def fetch() -> None:
        base = f"http://127.0.0.1:{servers[0].server_port}"
        silent = socket.create_connection(("127.0.0.1", servers[0].server_port))  # as browsers open some in advance
        with pytest.raises(urllib.error.HTTPError, match="404") as refused:
            urllib.request.urlopen(f"{base}/../s.yaml", timeout=20)
        refused.value.close()
        asked = urllib.request.Request(f"{base}/a-trace.json", method="OPTIONS")
        with urllib.request.urlopen(asked, timeout=20) as answer:
            assert answer.headers["Access-Control-Allow-Private-Network"] == "true"
        with urllib.request.urlopen(f"{base}/a-trace.json", timeout=20) as answer:
            assert answer.headers["Cache-Control"] == "no-store"
            answers.append((answer.headers["Access-Control-Allow-Origin"], answer.read()))
        silent.close()

    def browse(address: str) -> bool:
        assert address == "https://ui.perfetto.dev/#!/?url=http://127.0.0.1:0/a-trace.json"
        fetching.append(threading.Thread(target=fetch))
        fetching[0].start()
        return True

    monkeypatch.setattr(opening, "_OneFile", Known)
    monkeypatch.setattr(webbrowser, "open", browse)
    answer = call(capsys, "trace", run, "--chrome", chrome, "--open")
    fetching[0].join()
    assert answer.code == 0, answer.err
    assert answers == [("https://ui.perfetto.dev", chrome.read_bytes())]
    assert json.loads(answers[0][1])


def test_a_port_that_is_taken_is_told(run, monkeypatch, tmp_path, browsed, capsys):
    with HTTPServer(("127.0.0.1", 0), opening._Answer) as other:
        monkeypatch.setattr(opening, "_PORT", other.server_port)
        answer = call(capsys, "trace", run, "--chrome", tmp_path / "t.json", "--open")
    assert answer.code == 1
    assert f"cannot serve at 127.0.0.1:{other.server_port}, from which Perfetto reads: " in answer.err
    assert browsed == []
