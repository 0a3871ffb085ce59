"""Scripts that cron starts.

| file | what it is |
|---|---|
| `nightly_report.py` | on one host: a run that is still going on is not joined by a second one |
| `two_hosts.py` | on two hosts: one of them runs per tick |
"""
