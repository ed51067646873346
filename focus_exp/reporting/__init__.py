"""From records to tables, findings, figures and the dashboard. Never imports torch."""
