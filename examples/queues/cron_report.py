"""A program that cron, a timer of systemd or a Kubernetes CronJob starts on several hosts."""

from reports import make_report

from only_one import only_one


@only_one("report")
def main() -> str:
    """Make the report of today."""
    return make_report(1)


if __name__ == "__main__":
    main()
