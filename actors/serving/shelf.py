"""The models of a replica: the default one, always there, and further ones, loaded when they are first asked for.

Serve's multiplexing keeps the further ones, at most so many, drops the least recently used one for a new one, and tells
the routers who has which. A model is dropped only when nobody uses it any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from ray import serve

from actors.serve_args import ServeArgs
from actors.serving.loaded_model import LoadedModel


class _Kept:
    """What Serve's multiplexing holds for a model: it calls `__del__`, on a thread of its own, to drop it."""

    def __init__(self, loaded: LoadedModel, drop: Callable[[], None]) -> None:
        self.loaded = loaded
        self._drop = drop

    def __del__(self) -> None:
        self._drop()


class Shelf:
    """The loaded models of a replica by name; the default one is under None."""

    def __init__(self, args: ServeArgs) -> None:
        self._args = args
        self._further = {further.name: further for further in args.models}
        self.default = LoadedModel(args, args.default_model)
        self._loaded: dict[str, LoadedModel] = {}
        self._fetch: Callable[[str], Awaitable[_Kept]] = self._multiplexed()

    def _multiplexed(self) -> Callable[[str], Awaitable[_Kept]]:
        async def load_model(name: str) -> _Kept:
            loop = asyncio.get_running_loop()
            loaded = await loop.run_in_executor(None, LoadedModel, self._args, self._further[name])
            self._loaded[name] = loaded
            return _Kept(loaded, lambda: self._drop(name, loaded))

        wrapped: Callable[[str], Awaitable[_Kept]] = serve.multiplexed(
            max_num_models_per_replica=self._args.models_per_replica
        )(load_model)
        return wrapped

    def knows(self, name: str | None) -> bool:
        """Whether the model is one of this replica's; a replica of an older deployment lacks what a newer one adds."""
        return name is None or name in self._further

    @asynccontextmanager
    async def using(self, name: str | None) -> AsyncIterator[LoadedModel]:
        """A model, loaded if it is not; it stays until the end of the block. None: the default one."""
        loaded = self.default
        held = name is None
        while name is not None and not held:  # it may be dropped again before it can be held
            # Whoever leaves meanwhile must not stop the loading: Serve's books would not know of it.
            loaded = (await asyncio.shield(asyncio.ensure_future(self._fetch(name)))).loaded
            held = loaded.hold()
        try:
            yield loaded
        finally:
            if name is not None:
                loaded.release()

    def all(self) -> dict[str, LoadedModel]:
        """What is loaded now, by name; "" is the default one."""
        return {"": self.default, **self._loaded}

    def _drop(self, name: str, loaded: LoadedModel) -> None:
        if self._loaded.get(name) is loaded:
            loaded.close()
            del self._loaded[name]  # first: a stopped engine in it would count as a crashed one
            loaded.stop()

    def close(self) -> None:
        """Stop every engine."""
        every = list(self.all().values())
        self._loaded = {}
        for loaded in every:
            loaded.stop()
