"""Address and API key of an endpoint, from a serving run's `endpoint.json` or a URL."""

import json
import os
import stat
from dataclasses import asdict, dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

FILE = "endpoint.json"
AWAY = "X-No-Replica"
"""Header of a balancer's response if no replica is up; clients treat it like a refused connection."""


@dataclass(frozen=True, kw_only=True)
class Address:
    """Address of an endpoint, with what its clients need to know.

    Attributes:
        url: URL of the API, which ends in `/v1`.
        model: name of the model at the endpoint; "" selects the only model that the endpoint serves.
        key: API key; None if the endpoint needs none.
        digest: digest of the served checkpoint; None if unknown.
    """

    url: str
    model: str = ""
    key: str | None = field(default=None, repr=False)
    digest: str | None = None

    def __post_init__(self) -> None:
        url = urlsplit(self.url)
        if url.username or url.password or url.query:
            raise ValueError(
                "the endpoint's URL must not contain a name, password or query; set key_variable to the name of the "
                "environment variable that holds the key"
            )
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError(f"the endpoint's URL must be like http://localhost:8000/v1, not {self.url!r}")
        object.__setattr__(self, "url", self.url.rstrip("/"))


def read_address(place: str | Path, model: str | None = None, key_variable: str | None = None) -> Address:
    """Read an endpoint's address.

    Args:
        place: run directory of `nemo-ext serve`, its `endpoint.json`, or a URL.
        model: name of the model; None for the one in the file.
        key_variable: environment variable that holds the key; None for the key in the file.

    Raises:
        ValueError: the file does not exist or is invalid, or the environment variable is not set.
    """
    key = None
    if key_variable is not None:
        key = os.environ.get(key_variable)
        if not key:
            raise ValueError(f"key_variable: the environment variable {key_variable} is not set; set it to the key")
    if "://" in str(place):
        return Address(url=str(place), model=model or "", key=key)
    file = Path(place).expanduser()
    file = file / FILE if file.is_dir() else file
    try:
        content = json.loads(file.read_bytes())
        stored = Address(**{name: content.get(name) for name in ("url", "model", "key", "digest")})
    except FileNotFoundError:
        raise ValueError(
            f"{file} does not exist; check the path, or wait until `nemo-ext serve` has created it"
        ) from None
    except (OSError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{file} does not contain the address of an endpoint ({error}); name a run directory of `nemo-ext serve`"
        ) from None
    return Address(url=stored.url, model=model or stored.model, key=key or stored.key, digest=stored.digest)


def write_address(path: Path, address: Address) -> None:
    """Write an address to a file that only its owner can read (mode 0600), with an atomic rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, stat.S_IRUSR | stat.S_IWUSR), "w") as file:
        file.write(json.dumps(asdict(address), indent=1) + "\n")
    temporary.replace(path)
