"""A private CA and certificates of it, made anew for each run."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID


@dataclass(frozen=True)
class TlsFiles:
    """What a service is given."""

    cert: Path
    key: Path
    ca: Path

    def paths(self) -> tuple[Path, Path, Path]:
        """Certificate, key and CA."""
        return (self.cert, self.key, self.ca)

    def settings(self) -> dict[str, Path]:
        """As settings of a service."""
        return {"tls_cert_file": self.cert, "tls_key_file": self.key, "tls_ca_file": self.ca}


class Authority:
    """Signs certificates and writes them into a folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._folder = folder
        self._ca = trustme.CA()
        self.ca_file = folder / "ca.crt"
        self.ca_file.write_bytes(self._ca.cert_pem.bytes())

    def issue(self, name: str = "worker.example", *, days: tuple[int, int] = (-1, 1)) -> TlsFiles:
        """A certificate that is valid from ``days[0]`` to ``days[1]``, counted from today."""
        now = datetime.now(UTC).replace(tzinfo=None)
        issued = self._ca.issue_cert(
            name,
            not_before=now + timedelta(days=days[0]),
            not_after=now + timedelta(days=days[1]),
        )
        stem = f"{name}{days[0]:+d}{days[1]:+d}"
        files = TlsFiles(self._folder / f"{stem}.crt", self._folder / f"{stem}.key", self.ca_file)
        files.cert.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        files.key.touch(mode=0o600)
        files.key.write_bytes(issued.private_key_pem.bytes())
        return files

    def issue_for_servers_alone(self) -> TlsFiles:
        """A certificate with which nobody may dial."""
        files = self.issue("servers.example")
        ca = x509.load_pem_x509_certificate(self._ca.cert_pem.bytes())
        ca_key = serialization.load_pem_private_key(self._ca.private_key_pem.bytes(), None)
        assert isinstance(ca_key, ec.EllipticCurvePrivateKey)
        key = serialization.load_pem_private_key(files.key.read_bytes(), None)
        now = datetime.now(UTC)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "servers")]))
            .issuer_name(ca.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=1))
            .not_valid_after(now + timedelta(days=1))
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .sign(ca_key, hashes.SHA256())
        )
        files.cert.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        return files
