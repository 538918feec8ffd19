"""The bill of materials: what is inside, in CycloneDX 1.5 (https://cyclonedx.org/docs/1.5/json/)."""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from pathlib import Path


def cyclonedx(version: str, arch: str, wheels: list[Path], sha256: str) -> bytes:
    """JSON without a date: the same bytes for the same wheels."""
    parts: dict[tuple[str, str], dict[str, str]] = {}
    for wheel in wheels:
        name, number = wheel.name.split("-")[:2]
        found = parts.setdefault((re.sub(r"[-_.]+", "-", name).lower(), number), {})
        found[wheel.name] = hashlib.sha256(wheel.read_bytes()).hexdigest()
    components = [
        {
            "type": "library",
            "bom-ref": f"pkg:pypi/{name}@{number}",
            "name": name,
            "version": number,
            "purl": f"pkg:pypi/{name}@{number}",
            "properties": [
                {"name": f"wheel:{wheel}", "value": f"sha256:{value}"} for wheel, value in sorted(files.items())
            ],
        }
        for (name, number), files in sorted(parts.items())
    ]
    bill = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, f'llmgw:{version}:{arch}:{sha256}')}",
        "version": 1,
        "metadata": {
            "component": {
                "type": "application",
                "bom-ref": "llmgw",
                "name": "llmgw",
                "version": version,
                "hashes": [{"alg": "SHA-256", "content": sha256}],
            }
        },
        "components": components,
        "dependencies": [{"ref": "llmgw", "dependsOn": [each["bom-ref"] for each in components]}],
    }
    return (json.dumps(bill, indent=1, sort_keys=True) + "\n").encode()
