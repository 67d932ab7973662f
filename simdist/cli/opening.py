"""Show a file that was written: a page in the browser, a timeline in Perfetto.

Perfetto is a page that reads no files of a disk by itself. It takes the address of one, if that is on port 9001 of the
machine that it runs on. So the file is served there once, to Perfetto only, and never leaves the machine.

Source:
    https://perfetto.dev/docs/visualization/deep-linking-to-perfetto-ui and Perfetto's tools/open_trace_in_ui: the
    address, the only port that the page's content security policy allows, and the header for other origins.
"""

import re
import webbrowser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import final

from simdist.cli import common
from simdist.errors import RunError

_PERFETTO = "https://ui.perfetto.dev"
_HOST = "127.0.0.1"
_PORT = 9001  # the only one that Perfetto's page may read from


def open_page(session: common.CliSession, path: Path) -> None:
    """Open a page in the browser; tell its address if there is no browser."""
    _browse(session, path.resolve().as_uri())


def open_in_perfetto(session: common.CliSession, path: Path) -> None:
    """Serve a file until Perfetto has read it once, and open Perfetto with it.

    Raises:
        RunError: Another program uses the port.
    """
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", path.name)  # which no reader of addresses changes
    try:
        server = _OneFile(path, f"/{name}")
    except OSError as error:
        where = f"{_HOST}:{_PORT}, from which Perfetto reads"
        raise RunError(f"cannot serve at {where}: {error.strerror or error}: end the program that uses it") from None
    with server:
        _browse(session, f"{_PERFETTO}/#!/?url=http://{_HOST}:{_PORT}/{name}")
        session.say(f"serving {path} until it is opened; on another machine forward port {_PORT}; Ctrl-C ends it")
        while not server.is_read:
            server.handle_request()


def _browse(session: common.CliSession, address: str) -> None:
    opened = webbrowser.open(address)
    session.say(f"{'opened' if opened else 'no browser found: open'} {address}")


@final
class _OneFile(ThreadingHTTPServer):
    """Serves one file to Perfetto.

    Each connection has a thread, because browsers open some that ask for nothing.
    """

    daemon_threads = True
    timeout = 0.2  # seconds after which `handle_request` returns without one

    def __init__(self, path: Path, address: str) -> None:
        self.path = path
        self.address = address
        self.is_read = False
        super().__init__((_HOST, _PORT), _Answer)

    def handle_error(self, *_: object) -> None:
        """Say nothing of a browser that ends the connection early; it may ask again."""


@final
class _Answer(BaseHTTPRequestHandler):
    server: _OneFile

    def do_OPTIONS(self) -> None:
        """Allow Perfetto's page to read from this machine, where a browser asks before it does."""
        self.send_response(204)
        self._allow()
        self.send_header("Access-Control-Allow-Private-Network", "true")
        self.end_headers()

    def do_GET(self) -> None:
        """Send the file, and nothing else."""
        if self.path != self.server.address:
            self.send_error(404)
            return
        content = self.server.path.read_bytes()
        self.send_response(200)
        self._allow()
        self.send_header("Cache-Control", "no-store")  # the next trace of that name is another one
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
        self.server.is_read = True

    def _allow(self) -> None:
        self.send_header("Access-Control-Allow-Origin", _PERFETTO)

    def log_message(self, *_: object) -> None:
        """Print nothing."""
