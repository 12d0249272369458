"""The shortest look: opens a local sandbox, runs a command in it, says what isolation it got, and leaves nothing behind."""

import asyncio

import rollyard as ry


async def main() -> None:
    async with ry.sandbox.backend("local") as backend, backend.open(ry.SandboxSpec()) as box:
        done = await box.exec(["sh", "-c", "echo hello from $(hostname); id -u; ls /"], timeout=10)
        print(done.text)
        print(f"isolation: {box.info.isolation}; exit code: {done.exit_code}")


if __name__ == "__main__":
    asyncio.run(main())
