"""What people look with: command, runner, records and reports, diagnosis, doctor, tune, trace."""
