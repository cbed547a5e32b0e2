"""Jobs, runs with their timelines, logs, workers, and the cache of simulated predictions."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "predictions",
        sa.Column("spec_hash", sa.String(16), nullable=False),
        sa.Column("method", sa.String(16), nullable=False),
        sa.Column("code_version", sa.String(16), nullable=False),
        sa.Column("result", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("timeline", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("created_at", sa.String(27), nullable=False),
        sa.PrimaryKeyConstraint("spec_hash", "method", "code_version", name="pk_predictions"),
    )
    op.create_table(
        "workers",
        sa.Column("id", sa.String(200), nullable=False),
        sa.Column("host", sa.String(100), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("pid_started", sa.Double(), nullable=False),
        sa.Column("heartbeat_at", sa.String(27), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_workers"),
    )
    op.create_table(
        "jobs",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("name", sa.String(200), nullable=True),
        sa.Column("method", sa.String(16), nullable=False),
        sa.Column("lane", sa.String(16), nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("spec", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("vary", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("timeout_seconds", sa.Double(), nullable=False),
        sa.Column("runs_total", sa.Integer(), nullable=False),
        sa.Column("runs_done", sa.Integer(), nullable=False),
        sa.Column("progress", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("error", sa.String(), nullable=True),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("attempt_token", sa.String(32), nullable=True),
        sa.Column("worker", sa.String(200), nullable=True),
        sa.Column("lease_expires_at", sa.String(27), nullable=True),
        sa.Column("losses", sa.Integer(), nullable=False),
        sa.Column("idempotency_key", sa.String(200), nullable=True),
        sa.Column("request_hash", sa.String(64), nullable=True),
        sa.Column("created_at", sa.String(27), nullable=False),
        sa.Column("started_at", sa.String(27), nullable=True),
        sa.Column("finished_at", sa.String(27), nullable=True),
        sa.CheckConstraint("lane IN ('benchmark', 'simulation')", name="ck_jobs_lane"),
        sa.CheckConstraint("method IN ('closed-form', 'simulated', 'measured')", name="ck_jobs_method"),
        sa.CheckConstraint(
            "status IN ('queued', 'running', 'cancelling', 'succeeded', 'failed', 'cancelled', 'timed_out')",
            name="ck_jobs_status",
        ),
        sa.ForeignKeyConstraint(["worker"], ["workers.id"], name="fk_jobs_worker_workers", ondelete="SET NULL"),
        sa.PrimaryKeyConstraint("id", name="pk_jobs"),
        sa.UniqueConstraint("idempotency_key", name="uq_jobs_idempotency_key"),
    )
    op.create_index("ix_jobs_queue", "jobs", ["status", "lane", "priority", "id"], unique=False)
    op.create_table(
        "log_lines",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("job_id", sa.String(32), nullable=False),
        sa.Column("at", sa.String(27), nullable=False),
        sa.Column("message", sa.String(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_log_lines_job_id_jobs", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name="pk_log_lines"),
    )
    op.create_index("ix_log_lines_job_id_id", "log_lines", ["job_id", "id"], unique=False)
    op.create_table(
        "runs",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("job_id", sa.String(32), nullable=True),
        sa.Column("spec_hash", sa.String(16), nullable=False),
        sa.Column("method", sa.String(16), nullable=False),
        sa.Column("outcome", sa.String(8), nullable=False),
        sa.Column("spec", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("numbers", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("result", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("created_at", sa.String(27), nullable=False),
        sa.CheckConstraint("method IN ('closed-form', 'simulated', 'measured')", name="ck_runs_method"),
        sa.CheckConstraint("outcome IN ('ok', 'oom', 'failed')", name="ck_runs_outcome"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_runs_job_id_jobs", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name="pk_runs"),
        sa.UniqueConstraint("job_id", "spec_hash", "method", name="uq_runs_once"),
    )
    op.create_index("ix_runs_created_at_id", "runs", ["created_at", "id"], unique=False)
    op.create_index("ix_runs_spec_hash", "runs", ["spec_hash"], unique=False)
    op.create_table(
        "timelines",
        sa.Column("run_id", sa.String(32), nullable=False),
        sa.Column("timeline", sa.JSON(none_as_null=True), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_timelines_run_id_runs", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", name="pk_timelines"),
    )


def downgrade() -> None:
    op.drop_table("timelines")
    op.drop_index("ix_runs_spec_hash", table_name="runs")
    op.drop_index("ix_runs_created_at_id", table_name="runs")
    op.drop_table("runs")
    op.drop_index("ix_log_lines_job_id_id", table_name="log_lines")
    op.drop_table("log_lines")
    op.drop_index("ix_jobs_queue", table_name="jobs")
    op.drop_table("jobs")
    op.drop_table("workers")
    op.drop_table("predictions")
