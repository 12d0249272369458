"""Training: rows for trainers, and a small model server. Everything that needs torch imports it on first use."""
