"""Alembic's entry: run inside the transaction that `app.db.migrate` has begun."""

from alembic import context

from app.db.models import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    render_as_batch=True,
    compare_type=True,
    transactional_ddl=False,  # the caller's transaction spans all revisions
)
context.run_migrations()
