"""What other systems recorded, brought into a store: Inspect logs, Harbor jobs, ATIF documents."""
