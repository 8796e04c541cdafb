"""Engine, both links and the worker's loop together: real sockets, real worker processes, exact answers."""

from __future__ import annotations

from support.world import World, request


def test_many_answers_are_exact_through_sockets() -> None:
    with World() as world:
        world.start_worker()
        world.wait_joined()
        streams = [world.submit(request(i, prompt_len=5 + i % 40, max_tokens=8 + i % 50)) for i in range(100)]
        world.wait_ended(streams)
        for stream in streams:
            stream.check(world.options.vocab_size)
        snapshot = world.engine.snapshot()
        assert snapshot.incarnation == 1
        assert snapshot.link.bad_frames == snapshot.link.stale_messages == 0
