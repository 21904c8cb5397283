"""The packages of the wheel; everything else is in pyproject.toml. `migrations` is installed as `gateway.migrations`: its name is general."""

from setuptools import find_packages, setup

PRODUCT = find_packages(include=["headgate*", "gateway*", "trainer*", "scheduler*"])

setup(
    packages=[*PRODUCT, "gateway.migrations", "gateway.migrations.versions"],
    package_dir={"gateway.migrations": "migrations"},
)
