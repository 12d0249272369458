"""Bad input: a typed error that names what was wrong, before anything is opened, with no secret in it."""

from __future__ import annotations

import secrets

from rollyard.core.errors import ConfigError, Error, IsolationTooWeak, Unsupported
from rollyard.core.sandbox import SandboxSpec
from rollyard.testing.sandbox.fixture import SandboxFixture, raises, sh
from rollyard.testing.suite import Skip, case, check


@case("X1", "names an image it does not know, and what to do", needs=("images",))
async def unknown_image(fixture: SandboxFixture) -> None:
    error = await raises(Error, _open(fixture, image="no-such-image:0"), "an unknown image")
    check("no-such-image:0" in str(error), f"the error does not name the image: {error}")


@case("X2", "raises rather than give weaker isolation than asked for")
async def too_weak(fixture: SandboxFixture) -> None:
    if fixture.can.isolation == "microvm":
        raise Skip("nothing is stronger than a microvm")
    try:
        async with fixture.open(min_isolation="microvm", boot_s=60.0) as box:
            got = box.info.isolation
    except IsolationTooWeak:
        return
    check(got == "microvm", f"isolation 'microvm' was asked for, and a sandbox with {got!r} came")


@case("X3", "refuses what it said it cannot do")
async def refuses_unsupported(fixture: SandboxFixture) -> None:
    async with fixture.open() as box:
        calls = {"snapshot": box.snapshot, "pause": box.pause, "listen": box.listen}
        for name, call in calls.items():
            if not getattr(fixture.can, name):
                await raises(Unsupported, call(), f"{name} without the capability")


@case("X4", "refuses an unknown option by name")
async def unknown_option(fixture: SandboxFixture) -> None:
    error = await raises(Error, _open(fixture, options={"privileged": "true"}), "options={'privileged': 'true'}")
    check("privileged" in str(error), f"the error does not name the option: {error}")


@case("X5", "keeps secrets out of error texts")
async def no_secret_in_errors(fixture: SandboxFixture) -> None:
    secret = f"canary-{secrets.token_hex(8)}"
    env = {"API_KEY": secret}
    texts: list[str] = []
    for changes in ({"image": "no-such-image:0"}, {"user": "no-such-user"}, {"options": {"privileged": "true"}}):
        try:
            await _open(fixture, env=env, **changes)
        except Error as error:
            texts += [str(error), repr(error)]
    async with fixture.open(env=env) as box:
        for cwd, user in (("/no/such/dir", None), (None, "no-such-user")):
            try:
                await sh(box, "true", env=env, cwd=cwd, user=user)
            except Error as error:
                texts += [str(error), repr(error)]
    check(not any(secret in text for text in texts), "a secret is in an error text")


@case("X6", "refuses impossible values before anything is asked of the backend")
async def impossible_values(fixture: SandboxFixture) -> None:
    for bad in ({"ttl_s": 0}, {"ttl_s": -1}, {"env": {"A=B": "x"}}, {"env": {"A": "\0"}}, {"network": "allowlist"}):
        try:
            SandboxSpec(**bad)  # pyright: ignore[reportArgumentType] - wrong values are the point
        except ConfigError:
            continue
        raise AssertionError(f"SandboxSpec({bad}) was accepted")


async def _open(fixture: SandboxFixture, **changes: object) -> None:
    async with fixture.open(**changes):
        pass
