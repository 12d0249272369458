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
