"""The admin API: `/admin/v1`."""
