"""What setup.cfg cannot say: README as PyPI shows it, and an sdist that depends on nothing but its files."""

import gzip
import os
import re
import tarfile
from configparser import ConfigParser
from pathlib import Path
from typing import Any

from setuptools import setup
from setuptools.command.sdist import sdist

SETTINGS = ConfigParser()
SETTINGS.read("setup.cfg")
(SITE,) = re.findall("Documentation = (.*)", SETTINGS["metadata"]["project_urls"])


def address(link: re.Match[str]) -> str:
    """The page or picture of the site to which a link in README leads, because PyPI has no other files."""
    page, ending = link.groups()
    return f"]({SITE}{page.lower()}.{ending.replace('md', 'html')}"


class ReproducibleSdist(sdist):
    """With SOURCE_DATE_EPOCH, the archive has that time for all files, and no user."""

    def make_archive(self, base_name: str, format: str, *args: Any, base_dir: str, **options: Any) -> str:  # noqa: A002
        """Make it as setuptools calls for it."""
        epoch = os.environ.get("SOURCE_DATE_EPOCH")
        if epoch is None:
            return str(super().make_archive(base_name, format, *args, base_dir=base_dir, **options))

        def plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
            member.mtime, member.uid, member.gid, member.uname, member.gname = int(epoch), 0, 0, "", ""
            return member

        name = f"{base_name}.tar.gz"
        with gzip.GzipFile(name, "wb", mtime=int(epoch)) as file, tarfile.open(fileobj=file, mode="w") as archive:
            archive.add(base_dir, filter=plain)
        return name


setup(
    cmdclass={"sdist": ReproducibleSdist},
    long_description=re.sub(r"\]\((?:docs/)?([\w/-]+)\.(md|svg)", address, Path("README.md").read_text()),
    long_description_content_type="text/markdown",
)
