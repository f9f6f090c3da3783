"""What an engine imports: backends, metadata kernels, schedules and the policy."""
