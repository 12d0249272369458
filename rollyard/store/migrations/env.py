"""How alembic reaches the database: by the connection it was handed, inside that connection's transaction."""

from alembic import context

from rollyard.store.schema import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    render_as_batch=True,
    transaction_per_migration=False,
)
context.run_migrations()
