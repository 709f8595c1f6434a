"""Does something at a chosen line of the package, or of OpenVINO's Python half, while a function runs."""

import linecache
import signal
import sys
import threading

PLACES = ("contbatch", "paged_attention", "openvino")


class _Tracer:
    def __init__(self, chosen, action):
        self.chosen, self.action = chosen, action
        self.lines = 0

    def __call__(self, frame, event, _):
        if event == "line":
            # A block is left on the line where it began. Python looks for no signal between that and the exit itself,
            # so that an action there would leave a lock taken that no Ctrl-C can.
            if linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with "):
                return self
            self.lines += 1
            if self.lines in self.chosen:
                self.action()
        elif event == "call" and not any(place in frame.f_code.co_filename for place in PLACES):
            return None
        return self


def run_traced(tracer, function):
    """Call `function` with a trace function."""
    assert threading.current_thread() is threading.main_thread()
    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        return function()
    finally:
        sys.settrace(before)


def lines_of(function):
    """How many lines of those places a call runs through."""
    tracer = _Tracer((), None)
    run_traced(tracer, function)
    return tracer.lines


def do_at(line, action, function):
    """Call `function`, and `action` in the middle of it."""
    return run_traced(_Tracer({line}, action), function)


def raise_at(line, function, again_after=0):
    """Call `function` and press Ctrl-C when it comes to a line, and if asked for so many lines later again."""
    tracer = _Tracer({line, line + again_after}, lambda: signal.raise_signal(signal.SIGINT))
    return run_traced(tracer, function)
