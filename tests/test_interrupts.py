import signal
import threading

import pytest

from contbatch.interrupts import interrupts_held_back


class Log(list):
    def press(self):
        signal.raise_signal(signal.SIGINT)
        self.append("still here")

    def one(self):
        with interrupts_held_back():
            self.press()

    def two(self):
        with interrupts_held_back():
            self.press()
            self.press()

    def nested_one(self):
        with interrupts_held_back():
            self.one()
            self.append("outer")

    def nested_two(self):
        with interrupts_held_back():
            self.two()

    def error(self):
        with interrupts_held_back():
            self.press()
            raise ZeroDivisionError


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("one", ["still here"]),
        ("two", ["still here"]),
        ("nested_one", ["still here", "outer"]),
        ("nested_two", ["still here"]),
        ("error", ["still here"]),
    ],
)
def test_an_interrupt_waits_for_the_outermost_block_and_a_second_does_not(name, expected):
    log = Log()
    with pytest.raises(KeyboardInterrupt) as caught:
        getattr(log, name)()
    assert log == expected
    assert isinstance(caught.value.__context__, ZeroDivisionError) == (name == "error")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.fixture
def restored():
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("restored")
def test_a_handler_of_the_user_is_called_at_the_end_and_stays():
    log = Log()

    def handler(number, frame):
        log.append(number)

    signal.signal(signal.SIGINT, handler)
    log.nested_one()
    assert log == ["still here", "outer", signal.SIGINT]
    log.clear()
    log.two()
    assert log == ["still here", signal.SIGINT, "still here", signal.SIGINT]
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.usefixtures("restored")
def test_who_ignores_interrupts_goes_on_ignoring_them():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    log = Log()
    log.nested_one()
    assert log == ["still here", "outer"]
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN


def test_other_threads_are_left_alone():
    seen = []

    def work():
        with interrupts_held_back():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]


@pytest.mark.usefixtures("restored")
def test_a_block_that_a_second_interrupt_left_by_no_exit_takes_the_first_with_it():
    """As one does that hits a `with` line on the way out: warnings are errors here, and one in a finalizer is one."""
    handler = signal.getsignal(signal.SIGINT)
    block = interrupts_held_back()
    block.__enter__()
    signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is not handler
    del block
    assert signal.getsignal(signal.SIGINT) is handler
