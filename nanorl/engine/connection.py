"""One HTTP call to an engine, synchronous: timeouts, bounded retries, and errors that name the URL and what came."""

import time
from typing import Any, TypeVar

import msgspec
import requests
import requests.adapters

from nanorl.errors import EngineError

T = TypeVar("T")

RETRY_WAITS_S = (0.1, 0.4, 1.6)
"""Waits before the second, third and fourth try of a call that may be repeated."""


def error_message(body: bytes) -> str:
    """What an engine says went wrong, out of `{"error": {"message"}}`, `{"message"}`, `{"detail"}` or plain text."""
    try:
        decoded: Any = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return body[:500].decode("utf-8", "replace").strip() or "an empty body"
    if isinstance(decoded, dict):
        found: Any = decoded.get("error", decoded)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        if isinstance(found, dict):
            found = found.get("message", found.get("detail", found))  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        return str(found)  # pyright: ignore[reportUnknownArgumentType]
    return str(decoded)


class HttpConnection:
    """A kept connection to one engine. Not for several threads at once: each makes its own.

    A call is repeated after a refused connection (nothing was processed), and after any transport fault where the
    caller says that doing it twice is harmless. Everything else is raised at once.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        self.url = url.rstrip("/")
        self.timeout_s = timeout_s
        self._session = requests.Session()
        # The engine is a peer on this host or cluster: a proxy from the environment would only get in the way.
        self._session.trust_env = False
        self._session.mount("http://", requests.adapters.HTTPAdapter(max_retries=0, pool_maxsize=1))

    def call(
        self, method: str, path: str, body: Any = None, *, repeatable: bool = False, timeout_s: float | None = None
    ) -> requests.Response:
        """Sends one request and returns whatever the engine answered, also 4xx and 5xx.

        Raises:
            EngineError: no answer: refused, cut off, or later than the timeout.
        """
        data = None if body is None else msgspec.json.encode(body)
        for wait_s in (*RETRY_WAITS_S, None):
            try:
                return self._session.request(
                    method,
                    self.url + path,
                    data=data,
                    headers={"Content-Type": "application/json"},
                    timeout=(5.0, timeout_s or self.timeout_s),
                )
            except requests.RequestException as error:
                may_repeat = repeatable or _is_refused(error)
                if wait_s is None or not may_repeat or isinstance(error, requests.ReadTimeout):
                    raise EngineError(self._no_answer(method, path, error, timeout_s or self.timeout_s)) from None
                time.sleep(wait_s)
        raise AssertionError("unreachable: the last round returns or raises")

    def call_ok(
        self, method: str, path: str, body: Any = None, *, repeatable: bool = False, timeout_s: float | None = None
    ) -> requests.Response:
        """`call`, where anything but a 2xx is an error.

        Raises:
            EngineError: no answer, or the engine refused; with its message.
        """
        response = self.call(method, path, body, repeatable=repeatable, timeout_s=timeout_s)
        if not response.ok:
            came = f"{response.status_code}: {error_message(response.content)}"
            raise EngineError(f"{method} {self.url}{path}: expected 200, got {came}")
        return response

    def decode(self, response: requests.Response, answer: type[T]) -> T:
        """The body as `answer`.

        Raises:
            EngineError: the body is something else; is this an engine at all?
        """
        try:
            return msgspec.json.decode(response.content, type=answer)
        except msgspec.DecodeError as error:
            raise EngineError(
                f"{response.url}: expected a body like {answer.__name__}, got {response.content[:200]!r} ({error}). "
                "Is it an engine that speaks SGLang's HTTP dialect?"
            ) from None

    def close(self) -> None:
        """Gives the connection back."""
        self._session.close()

    def _no_answer(self, method: str, path: str, error: requests.RequestException, timeout_s: float) -> str:
        call = f"{method} {self.url}{path}"
        if isinstance(error, requests.ReadTimeout):
            return f"{call}: no answer within {timeout_s:g} s. Is the engine hung or overloaded?"
        if _is_refused(error):
            return f"{call}: nothing listens there. Start an engine with `nanorl serve`, or check the URL."
        return f"{call}: the connection broke: {error}. Did the engine die?"


def _is_refused(error: requests.RequestException) -> bool:
    """Whether the connection was never made, so that the engine can't have seen the request."""
    return isinstance(error, requests.ConnectionError) and "NewConnectionError" in repr(error)
