"""What can go wrong, as types. Every message names the thing, the limit and what to do about it."""


class SimpleLLMError(Exception):
    """Base of every error this package raises on purpose."""


class CheckpointError(SimpleLLMError):
    """A checkpoint that cannot be loaded: a missing, extra, truncated or misshapen part, or another architecture."""


class RequestError(SimpleLLMError, ValueError):
    """A request refused at the door.

    `field` names the argument, `index` the prompt within the call where there are several.
    """

    def __init__(self, field: str, problem: str, index: int | None = None):
        self.field, self.problem, self.index = field, problem, index
        where = "" if index is None else f"prompt {index}: "
        super().__init__(f"{where}{field}: {problem}")

    def __reduce__(self) -> tuple[type["RequestError"], tuple[str, str, int | None]]:
        return RequestError, (self.field, self.problem, self.index)

    def at(self, index: int) -> "RequestError":
        """The same refusal, naming the prompt it concerns."""
        return RequestError(self.field, self.problem, index)


class OptionError(SimpleLLMError, ValueError):
    """An engine option that does not exist, or whose value is out of range."""


class EngineError(SimpleLLMError, RuntimeError):
    """The engine cannot go on: it was stopped, or a step failed."""
