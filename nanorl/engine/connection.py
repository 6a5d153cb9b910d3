"""One HTTP call to an engine, synchronous: timeouts, bounded retries, and errors that name the URL and what came."""

import html
import re
import textwrap
import time
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import urllib3
from urllib3.exceptions import HTTPError, NewConnectionError, ReadTimeoutError

from nanorl.errors import EngineError

T = TypeVar("T")

RETRY_WAITS_S = (0.1, 0.4, 1.6)
"""Waits before the second, third and fourth try of a call that may be repeated."""

WHAT_IS_THIS = "Is it an engine that speaks SGLang's HTTP dialect?"

PAGE_BYTES = 20_000
MESSAGE_WIDTH = 200
"""How much of an answer without structure is read, and how much of that is shown."""


def error_message(body: bytes) -> str:
    """What an engine says went wrong, out of `{"error": {"message"}}`, `{"message"}`, `{"detail"}` or plain text.

    A page in HTML, as foreign servers and proxies answer, becomes one line of its text.
    """
    try:
        decoded: Any = msgspec.json.decode(body)
    except msgspec.DecodeError:
        text = body[:PAGE_BYTES].decode("utf-8", "replace")
        if re.search(r"<(!doctype|html|head|body)\b", text, re.IGNORECASE):
            text = html.unescape(re.sub(r"<(style|script).*?</\1>|<[^>]*>", " ", text, flags=re.DOTALL | re.IGNORECASE))
        return textwrap.shorten(text, MESSAGE_WIDTH, placeholder=" ...") or "an empty body"
    if isinstance(decoded, dict):
        found: Any = decoded.get("error", decoded)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        if isinstance(found, dict):
            found = found.get("message", found.get("detail", found))  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        return str(found)  # pyright: ignore[reportUnknownArgumentType]
    return str(decoded)


@dataclass(frozen=True, slots=True)
class Response:
    """What an engine answered."""

    url: str
    status_code: int
    content: bytes

    @property
    def ok(self) -> bool:
        """2xx."""
        return 200 <= self.status_code < 300


class HttpConnection:
    """A kept connection to one engine. Not for several threads at once: each makes its own.

    A call is repeated after a refused connection (nothing was processed), and after any transport fault where the
    caller says that doing it twice is harmless. Everything else is raised at once.

    urllib3, not requests, which wraps it: the wrapping took 0.7 ms of each 8 ms call of a weight update.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        self.url = url.rstrip("/")
        self.timeout_s = timeout_s
        # No proxy from the environment: the engine is a peer on this host or cluster.
        self._pool = urllib3.PoolManager(num_pools=1, maxsize=1, retries=False)

    def call(
        self, method: str, path: str, body: Any = None, *, repeatable: bool = False, timeout_s: float | None = None
    ) -> Response:
        """Sends one request and returns whatever the engine answered, also 4xx and 5xx.

        Raises:
            EngineError: no answer: refused, cut off, or later than the timeout.
        """
        url, data = self.url + path, None if body is None else msgspec.json.encode(body)
        headers = {"Content-Type": "application/json"}
        timeout = urllib3.Timeout(connect=5.0, read=timeout_s or self.timeout_s)
        for wait_s in (*RETRY_WAITS_S, None):
            try:
                answer = self._pool.urlopen(method, url, body=data, headers=headers, timeout=timeout, redirect=False)
                return Response(url, answer.status, answer.data)
            except HTTPError as error:
                may_repeat = repeatable or isinstance(error, NewConnectionError)
                if wait_s is None or not may_repeat or isinstance(error, ReadTimeoutError):
                    raise EngineError(self._no_answer(method, path, error, timeout_s or self.timeout_s)) from None
                time.sleep(wait_s)
        raise AssertionError("unreachable: the last round returns or raises")

    def call_ok(
        self, method: str, path: str, body: Any = None, *, repeatable: bool = False, timeout_s: float | None = None
    ) -> Response:
        """`call`, where anything but a 2xx is an error.

        Raises:
            EngineError: no answer, or the engine refused; with its message.
        """
        response = self.call(method, path, body, repeatable=repeatable, timeout_s=timeout_s)
        if not response.ok:
            came = f"{response.status_code}: {error_message(response.content)}"
            hint = f". {WHAT_IS_THIS}" if response.status_code in (404, 405) else ""
            raise EngineError(f"{method} {self.url}{path}: expected 200, got {came.rstrip('.')}{hint}")
        return response

    def decode(self, response: Response, answer: type[T]) -> T:
        """The body as `answer`.

        Raises:
            EngineError: the body is something else; is this an engine at all?
        """
        try:
            return msgspec.json.decode(response.content, type=answer)
        except msgspec.DecodeError as error:
            came = error_message(response.content)[:MESSAGE_WIDTH]
            raise EngineError(
                f"{response.url}: expected a body like {answer.__name__}, got {came!r} ({error}). " + WHAT_IS_THIS
            ) from None

    def close(self) -> None:
        """Gives the connection back."""
        self._pool.clear()

    def _no_answer(self, method: str, path: str, error: HTTPError, timeout_s: float) -> str:
        call = f"{method} {self.url}{path}"
        if isinstance(error, ReadTimeoutError):
            return f"{call}: no answer within {timeout_s:g} s. Is the engine hung or overloaded?"
        if isinstance(error, NewConnectionError):
            return f"{call}: nothing listens there. Start an engine with `nanorl serve`, or check the URL."
        return f"{call}: the connection broke: {error}. Did the engine die?"
