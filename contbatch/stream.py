"""An answer as it grows."""

from collections.abc import Iterator

from contbatch.request import Request
from contbatch.text_engine import TextEngine


class TextStream(Iterator[str]):
    """Iterator over the text deltas of one request; made by `LLM.stream`.

    Closing or forgetting it aborts the request and frees its pages. `request` tells how it stands, such as its
    `finish_reason` once the stream has ended.
    """

    def __init__(self, engine: TextEngine, request: Request) -> None:
        self.request = request
        self._engine = engine
        self._deltas: list[str] = []
        try:
            engine.submit([request], self._deltas)
        except BaseException:
            self.close()
            raise

    def __next__(self) -> str:
        while not any(self._deltas):
            if self.request.is_finished:
                raise StopIteration
            try:
                self._engine.step()
            except BaseException:
                self.close()
                raise
        text = "".join(self._deltas)
        self._deltas.clear()
        return text

    def close(self) -> None:
        """Abort the request unless it is finished; idempotent."""
        self._engine.abandon([self.request])

    def __enter__(self) -> "TextStream":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        self._engine.drop(self.request)
