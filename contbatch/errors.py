"""Typed errors: each message names the offending value and the limit it broke."""


class ContbatchError(Exception):
    """Base of every error this package raises on purpose."""


class InvalidRequestError(ContbatchError, ValueError):
    """A request or its sampling parameters can never be served as given."""


class PolicyError(ContbatchError, RuntimeError):
    """A policy's plan broke the rules: a foreign or repeated request, or an impossible number of tokens."""


class PagePoolError(ContbatchError, RuntimeError):
    """Pages were asked for that are not free, or given back more often than taken."""


class SchedulerError(ContbatchError, RuntimeError):
    """The schedule-execute-update protocol was broken, such as by a step updated twice or a missing token."""


class StalledError(ContbatchError, RuntimeError):
    """Requests wait, yet the policy planned nothing: without this error the engine would idle for ever."""


class ModelFileError(ContbatchError, ValueError):
    """A model file is missing, truncated or malformed; the message names the file and what is wrong."""


class UnsupportedModelError(ContbatchError, ValueError):
    """A well-formed model uses a feature this package does not implement; the message names it."""


class LogitsError(ContbatchError, ValueError):
    """Logits from which no token can be chosen, such as NaN; fails the one request they belong to."""


class RunnerError(ContbatchError, RuntimeError):
    """A runner was used after close(), or was given inputs outside its limits (page ids, sequences)."""


class WorkloadError(ContbatchError, ValueError):
    """A workload, a distribution or an arrival process is out of its limits; the message names field and limit."""


class TraceFileError(ContbatchError, ValueError):
    """A trace file is missing or malformed; the message names the file and the line."""


class CostModelError(ContbatchError, ValueError):
    """Unknown hardware or model, a split of it that can't be, a time that is no number, or too little to fit to."""


class MissingDependencyError(ContbatchError, ImportError):
    """An optional package is needed; the message gives the line that installs it."""


class DetailError(ContbatchError, RuntimeError):
    """A figure was asked for that needs what a run with `detail=False` does not keep."""


class DecisionLogError(ContbatchError, ValueError):
    """A decision log was changed or cut, or tells of something that can't have happened; the message names the step."""


class KernelBuildError(ContbatchError, RuntimeError):
    """A GPU kernel could not be compiled, or its PTX is not of the form that a launcher expects."""


class EngineBuildError(ContbatchError, RuntimeError):
    """TensorRT refused a model, built no engine of it, or can't load one; the message holds TensorRT's own words."""


class DeviceError(ContbatchError, RuntimeError):
    """No usable GPU, too little of its memory, or a call of CUDA that failed; the message holds CUDA's own words."""


class ExperimentError(ContbatchError, ValueError):
    """An experiment, or the text that one is to be read from, is wrong."""


class RouterError(ContbatchError, RuntimeError):
    """A router chose a replica that there is not, or is none."""


class PriceError(ContbatchError, ValueError):
    """A price, or what is to be paid for, is out of its range."""


class ResultFileError(ContbatchError, ValueError):
    """A saved result is missing, damaged or something else, or one can't be saved; the message names the file."""


class NotebookError(ContbatchError, OSError):
    """The notebooks of this package are not there, or can't be copied to where they shall go."""
