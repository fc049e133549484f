"""Functions whose repeats get the first answer: the objects that ``@receiver.idempotent`` makes."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Self, TypeVar, cast, overload

from . import keys
from ._answers import Call, call_of
from ._blocking import run
from ._handlers import hint_of, is_awaited
from .codec import Unencodable
from .errors import InvalidKey, UsageError
from .policy import Policy

if TYPE_CHECKING:
    from ._messages import Outcome
    from ._receiver import Receiver

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
S = TypeVar("S")

KeySource = str | tuple[str, ...] | Callable[..., object] | None
RECEIVERS_OF_A_CALL = ("self", "cls")


class Identity:
    """Works out, from a function's arguments, which effect a call means and what it asks."""

    def __init__(
        self,
        function: Callable[..., Any],
        key: KeySource,
        scope: str | Callable[..., str],
        operation: str,
        version: str | int,
        ignore: tuple[str, ...] | str,
    ) -> None:
        self.function, self.key, self.scope, self.operation, self.ignore = (
            function,
            key,
            scope,
            operation,
            ignore,
        )
        self.version = version
        self.signature = inspect.signature(function)
        self.parameters = tuple(self.signature.parameters)
        self._positional = all(
            p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in self.signature.parameters.values()
        )
        if key == () or not (key is None or isinstance(key, str | tuple) or callable(key)):
            raise UsageError(f"key={key!r} must be a parameter's name, a tuple of names, or a function.")
        named = key if isinstance(key, tuple) else (key,) if isinstance(key, str) else ()
        if isinstance(ignore, str):
            raise UsageError(f"ignore={ignore!r} must be a tuple of names, such as ignore=({ignore!r},).")
        for name in (*(name.partition(".")[0] for name in named), *ignore):
            if name not in self.parameters:
                raise UsageError(
                    f"{operation} has no parameter {name!r}; it has {', '.join(self.parameters) or 'none'}."
                )
        apart = {*ignore, *named, *(name for name in self.parameters[:1] if name in RECEIVERS_OF_A_CALL)}
        self._asked = tuple(name for name in self.parameters if name not in apart)
        self._prefix = None if callable(scope) else keys.prefix(scope, operation, self.version)
        is_all = isinstance(key, str) and not self._asked and self._positional and self._prefix is not None
        self._place = self.parameters.index(key) if is_all and key in self.parameters else None
        """Where the argument is that says everything, if there is one."""

    def check_scope(self, scope: object) -> None:
        """Refuse a scope that was meant as a parameter's name, as a key is: all callers would share it."""
        if isinstance(scope, str) and scope in self.parameters:
            raise UsageError(
                f"scope={scope!r} is one scope for all callers, but {self.operation} has a parameter of that name. "
                f"To keep its callers apart, write scope=lambda {self._parameters_shown()}: {scope}."
            )

    def _parameters_shown(self) -> str:
        plain = [each.replace(annotation=each.empty) for each in self.signature.parameters.values()]
        return str(inspect.Signature(plain))[1:-1]

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any], policy: Policy, hint: Any) -> Call:
        """Describe one call. The arguments that the key does not name go into the fingerprint."""
        place = self._place
        if (
            place is not None
            and not kwargs
            and len(args) == len(self.parameters)
            and type(args[place]) is str
        ):
            return call_of(cast("str", self._prefix) + keys.check_id(args[place]), b"", policy, hint)
        bound = self.bind(args, kwargs)
        try:
            if self.key is None:
                id_ = keys.content_id({name: bound[name] for name in bound if name not in self.ignore})
                fingerprint = b""
            else:
                id_ = self._id(bound, args, kwargs)
                asked = self._asked
                fingerprint = keys.fingerprint({name: bound[name] for name in asked}) if asked else b""
        except Unencodable as error:
            raise UsageError(
                f"{self.operation} can't tell what this call asks: {error}. Name the key with key=, and leave out "
                "arguments that are tools rather than content with ignore=(...)."
            ) from error
        prefix = self._prefix or keys.prefix(self._scope(args, kwargs), self.operation, self.version)
        return call_of(prefix + id_, fingerprint, policy, hint)

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments by parameter name with defaults filled in, so that every way to write a call is one call."""
        if self._positional and not kwargs and len(args) == len(self.parameters):
            return dict(zip(self.parameters, args, strict=True))
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.arguments

    def _id(self, bound: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        key = self.key
        if isinstance(key, tuple):
            return keys.composite(*(_text(name, keys.lookup(bound, name)) for name in key))
        if isinstance(key, str):
            return keys.check_id(_text(key, bound[key] if key in bound else keys.lookup(bound, key)))
        assert key is not None
        return keys.check_id(_text("key", key(*args, **kwargs)))

    def _scope(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        assert callable(self.scope)
        scope = self.scope(*args, **kwargs)
        if not scope:
            raise InvalidKey(
                f"{self.operation}: the scope function gave {scope!r}; every caller needs a scope."
            )
        return scope


def _text(name: str, value: object) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, bool) and (isinstance(value, int) or keys.is_uuid(value)):
        return keys.digits(value)
    if value is None:
        raise InvalidKey(f"{name} is None, and nothing can be remembered under no key.")
    return keys.content_id(value)


class _Decorated(Generic[P, R]):
    """What both colours share."""

    def __init__(
        self,
        receiver: Receiver,
        function: Callable[..., Any],
        identity: Identity,
        policy: Policy,
        on: str = "",
    ) -> None:
        self._receiver, self._function, self._identity, self._policy = receiver, function, identity, policy
        self._on = on
        self._of_class = identity.parameters[:1] == ("cls",)
        functools.update_wrapper(cast("Any", self), function, updated=())
        if getattr(function, "__isabstractmethod__", False):
            cast("Any", self).__isabstractmethod__ = True

    @functools.cached_property
    def _hint(self) -> Any:
        return hint_of(self._function)

    def __reduce__(self) -> str:
        """By its name, as functions are pickled: for pools of processes."""
        return self._function.__qualname__

    def key(self, *args: P.args, **kwargs: P.kwargs) -> str:
        """The key of such a call, as stores and errors name it."""
        return self._call(args, kwargs).key

    def on(self, connection: Any, *, commit: bool = False) -> Self:
        """The same function for calls inside the transaction that a connection is in: see ``Receiver.on``."""
        kind = type(self)
        return kind(
            self._receiver.on(connection, commit=commit), self._function, self._identity, self._policy
        )

    def _asked(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Receiver:
        """The receiver on the connection that is among the arguments."""
        return self._receiver.on(self._identity.bind(args, kwargs)[self._on])

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        if self._of_class and not (args and isinstance(args[0], type)):
            raise UsageError(
                f"{self._identity.operation} was asked without its class. "
                "Write @receiver.idempotent above @classmethod."
            )
        return self._identity.call(args, kwargs, self._policy, self._hint)


class Function(_Decorated[P, R]):
    """A function whose effect happens once per key; every repeat gets the first answer."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run once, or answer as the first time."""
        return cast("R", self._run(args, kwargs).unwrap().value)

    def outcome(self, *args: P.args, **kwargs: P.kwargs) -> Outcome[R]:
        """The same, as an outcome that says what happened; it never raises for a refusal or a failure."""
        return self._run(args, kwargs)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Outcome[R]:
        receiver = self._asked(args, kwargs) if self._on else self._receiver
        call = self._call(args, kwargs)
        return run(receiver.flow.run(receiver.blocking, call, self._function, args, kwargs))

    @overload
    def __get__(self, instance: None, owner: Any = None) -> Self: ...
    @overload
    def __get__(self: Function[Concatenate[S, Q], R], instance: S, owner: Any = None) -> Function[Q, R]: ...
    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Bind to an object, as methods are."""
        return self if instance is None else _Bound(self, instance)


class AsyncFunction(_Decorated[P, R]):
    """A coroutine function whose effect happens once per key; every repeat gets the first answer."""

    async def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run once, or answer as the first time."""
        outcome = await self._run(args, kwargs)
        return cast("R", outcome.value if outcome.error is None else outcome.unwrap())

    async def outcome(self, *args: P.args, **kwargs: P.kwargs) -> Outcome[R]:
        """The same, as an outcome that says what happened; it never raises for a refusal or a failure."""
        return await self._run(args, kwargs)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Coroutine[Any, Any, Outcome[R]]:
        receiver = self._asked(args, kwargs) if self._on else self._receiver
        call = self._call(args, kwargs)
        return receiver.flow.run(receiver.asyncio, call, self._function, args, kwargs)

    @overload
    def __get__(self, instance: None, owner: Any = None) -> Self: ...
    @overload
    def __get__(
        self: AsyncFunction[Concatenate[S, Q], R], instance: S, owner: Any = None
    ) -> AsyncFunction[Q, R]: ...
    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Bind to an object, as methods are."""
        return self if instance is None else _Bound(self, instance)


class _Bound:
    """A decorated function together with the object it was looked up on."""

    def __init__(self, decorated: _Decorated[..., Any], instance: object) -> None:
        self.__wrapped__ = decorated
        self.__self__ = instance
        self.__doc__ = decorated.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return cast("Any", self.__wrapped__)(self.__self__, *args, **kwargs)

    def outcome(self, *args: Any, **kwargs: Any) -> Any:
        return cast("Any", self.__wrapped__).outcome(self.__self__, *args, **kwargs)

    def key(self, *args: Any, **kwargs: Any) -> str:
        return self.__wrapped__.key(self.__self__, *args, **kwargs)

    def on(self, connection: Any, *, commit: bool = False) -> _Bound:
        return _Bound(self.__wrapped__.on(connection, commit=commit), self.__self__)

    def __reduce__(self) -> tuple[Any, ...]:
        name = self.__wrapped__._function.__name__
        if getattr(self.__self__, name).__wrapped__ is not self.__wrapped__:
            raise TypeError(f"{name} on a connection can't be pickled.")
        return getattr, (self.__self__, name)

    @property
    def __signature__(self) -> inspect.Signature:
        whole = inspect.signature(cast("Any", self.__wrapped__))
        return whole.replace(parameters=list(whole.parameters.values())[1:])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__wrapped__, name)


class ClassFunction:
    """A decorated classmethod: it is bound to the class, wherever it is looked up."""

    def __init__(self, decorated: Any) -> None:
        self.__wrapped__ = decorated

    @property
    def __isabstractmethod__(self) -> bool:
        return getattr(self.__wrapped__, "__isabstractmethod__", False)

    def __get__(self, instance: object, owner: type) -> Any:
        return _Bound(self.__wrapped__, owner)


def decorate(
    receiver: Receiver, function: Callable[P, Any], identity: Identity, policy: Policy, on: str = ""
) -> Function[P, Any] | AsyncFunction[P, Any]:
    """Make the object of the right colour."""
    if is_awaited(function):
        decorated = AsyncFunction[P, Any](receiver, function, identity, policy, on)
        if sys.version_info >= (3, 12):
            inspect.markcoroutinefunction(decorated)
        else:  # frameworks ask asyncio, which knows coroutine functions by this mark, or inspect, by their code
            from asyncio import coroutines

            cast("Any", decorated)._is_coroutine = cast("Any", coroutines)._is_coroutine
            for name in ("__code__", "__defaults__", "__kwdefaults__"):
                if hasattr(function, name):
                    setattr(decorated, name, getattr(function, name))
        return decorated
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise UsageError(f"{identity.operation} is a generator; its values can't be replayed. Return a list.")
    return Function(receiver, function, identity, policy, on)
