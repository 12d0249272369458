"""A store needs no more of a PostgreSQL server than a schema that its role owns."""

import asyncpg
import pytest

import rollyard as ry

pytestmark = [pytest.mark.anyio, pytest.mark.adversarial]


async def test_a_role_that_owns_one_schema_is_enough_and_reaches_no_other(postgres_url):
    admin = await asyncpg.connect(postgres_url)
    name = postgres_url.rpartition("/")[2]
    await admin.execute(
        f"""
        CREATE TABLE public.others (secret text);
        CREATE ROLE runs_{name} LOGIN NOSUPERUSER NOCREATEDB NOCREATEROLE;
        REVOKE ALL ON DATABASE {name} FROM PUBLIC; REVOKE ALL ON SCHEMA public FROM PUBLIC;
        GRANT CONNECT ON DATABASE {name} TO runs_{name};
        CREATE SCHEMA runs AUTHORIZATION runs_{name};
        ALTER ROLE runs_{name} IN DATABASE {name} SET search_path = runs;
        """
    )
    url = postgres_url.replace("ry@", f"runs_{name}@")
    assert url != postgres_url
    try:
        async with ry.Store.open(url) as store:
            digest = await store.put_blob(b"x")
        async with ry.Store.open(url, create=False) as store:
            assert await store.get_blob(digest) == b"x"
        tables = await admin.fetch("SELECT schemaname FROM pg_tables WHERE tableowner = $1", f"runs_{name}")
        assert {row["schemaname"] for row in tables} == {"runs"}
        plain = await asyncpg.connect(url)
        for attack in ("SELECT * FROM public.others", "CREATE TABLE public.mine (x int)", "CREATE SCHEMA mine"):
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await plain.execute(attack)
        await plain.close()
    finally:
        await admin.execute(f"DROP OWNED BY runs_{name} CASCADE; DROP ROLE runs_{name}")
        await admin.close()


async def test_rows_alone_are_enough_once_the_tables_are_there(postgres_url):
    """The owner makes the tables; runs and pages then need no right to make, change or drop one."""
    async with ry.Store.open(postgres_url):
        pass
    admin = await asyncpg.connect(postgres_url)
    name = postgres_url.rpartition("/")[2]
    await admin.execute(
        f"""
        CREATE ROLE rows_{name} LOGIN NOSUPERUSER NOCREATEDB NOCREATEROLE;
        REVOKE CREATE ON SCHEMA public FROM PUBLIC;
        GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO rows_{name};
        GRANT USAGE ON ALL SEQUENCES IN SCHEMA public TO rows_{name};
        """
    )
    url = postgres_url.replace("ry@", f"rows_{name}@")
    try:
        async with ry.Store.open(url) as store:
            digest = await store.put_blob(b"x")
            assert await store.get_blob(digest) == b"x"
        plain = await asyncpg.connect(url)
        for attack in (
            "CREATE TABLE mine (x int)",
            "DROP TABLE blobs",
            "ALTER TABLE blobs ADD x int",
            "TRUNCATE blobs",
        ):
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await plain.execute(attack)
        await plain.close()
    finally:
        await admin.execute(f"DROP OWNED BY rows_{name} CASCADE; DROP ROLE rows_{name}")
        await admin.close()
