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
        engine.submit([request], self._deltas)

    def __next__(self) -> str:
        try:
            while True:
                text = "".join(self._deltas)
                self._deltas.clear()
                if text:
                    return text
                if self.request.is_finished:
                    raise StopIteration
                self._engine.step()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Abort the request unless it is finished; idempotent."""
        self._engine.abandon([self.request])

    def __enter__(self) -> "TextStream":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
