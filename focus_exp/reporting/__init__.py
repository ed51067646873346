"""From records to tables, findings, figures and the dashboard, without torch."""
