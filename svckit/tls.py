"""TLS between the services, with certificates on both sides, from three files.

The three files are the same kind for every service: a certificate, its key, and the CA that signed
the certificates of all services of this deployment. Only TLS 1.3 is spoken. Whoever dials and
whoever accepts must present a certificate that is valid today and leads to that CA.

Host names are not checked, on purpose. The CA is private and signs nothing but these services, so
a certificate of it means "one of us", the same statement as the shared secret makes; which of us is
said by role and instance id in the handshake above TLS and compared with what the router's registry
names. Workers are reached by the addresses they register, which change with every container, so
names in certificates would have to change with them and would prove nothing more. It follows that
the CA must not be one that also signs for others (a company's CA, a public one): every holder of
any of its certificates would be one of us. The system's list of CAs is never used.

A certificate may be shared by all services or issued for each; to take one back, replace the CA.
The files are read at the start: restart a service to give it new ones.
"""

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from svckit.errors import ConfigError
from svckit.private_file import read_private_file

_MAX_PEM_NBYTES: Final = 1 << 20
# A CA and its successors. More are a bundle of public CAs, with which everybody could connect.
MAX_CAS: Final = 16


@dataclass(frozen=True, slots=True)
class TlsContexts:
    """``server`` for the ports a service opens, ``client`` for those it dials; None: no TLS."""

    server: ssl.SSLContext | None
    client: ssl.SSLContext | None


def load_tls(cert_file: Path | None, key_file: Path | None, ca_file: Path | None) -> TlsContexts:
    """Contexts from PEM files; without TLS if none of the three is given.

    Raises ConfigError, checked in this order: some of the three missing; certificate, CA or key not
    readable; key open to group or others or encrypted; CA without certificates or with too many;
    certificate malformed; key of another certificate; certificate expired, not yet valid, not
    signed by the CA, or not meant for both ends of a connection.
    """
    given = {"tls_cert_file": cert_file, "tls_key_file": key_file, "tls_ca_file": ca_file}
    if cert_file is None or key_file is None or ca_file is None:
        missing = [name for name, path in given.items() if path is None]
        if len(missing) == len(given):
            return TlsContexts(None, None)
        raise ConfigError(
            f"TLS needs three files, but {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set; give all three, or none."
        )
    for what, path in (("certificate", cert_file), ("CA", ca_file)):
        _check_readable(what, path)
    key = read_private_file(key_file, "TLS key file", max_nbytes=_MAX_PEM_NBYTES)
    if b"ENCRYPTED" in key:
        raise ConfigError(
            f"The TLS key file {key_file} is encrypted, and nobody is there to type its "
            "passphrase; store the key without one, mode 0600."
        )
    server = _context(ssl.PROTOCOL_TLS_SERVER, cert_file, key_file, ca_file)
    client = _context(ssl.PROTOCOL_TLS_CLIENT, cert_file, key_file, ca_file)
    _check_with_itself(server, client, cert_file, ca_file)
    return TlsContexts(server, client)


def _check_readable(what: str, path: Path) -> None:
    try:
        with path.open("rb") as file:
            file.read(1)
    except OSError as exc:
        raise ConfigError(f"Cannot read the TLS {what} file {path}: {exc.strerror}.") from exc


def _context(protocol: int, cert_file: Path, key_file: Path, ca_file: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # every connection proves its certificate anew
    try:
        context.load_verify_locations(cafile=ca_file)
    except ssl.SSLError as exc:
        raise ConfigError(
            f"The TLS CA file {ca_file} holds no certificate in PEM form ({_reason(exc)})."
        ) from exc
    num_cas = context.cert_store_stats()["x509"]
    if num_cas > MAX_CAS:
        raise ConfigError(
            f"The TLS CA file {ca_file} holds {num_cas} certificates, more than {MAX_CAS}: with a "
            "bundle of public CAs everybody could connect; give the CA of this deployment alone."
        )
    try:
        context.load_cert_chain(cert_file, key_file, password="")
    except ssl.SSLError as exc:
        if exc.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(
                f"The TLS key file {key_file} is not the key of the certificate {cert_file}; "
                "give the two that were made together."
            ) from exc
        raise ConfigError(
            f"The TLS certificate file {cert_file} and key file {key_file} are not both in PEM "
            f"form ({_reason(exc)})."
        ) from exc
    return context


def _check_with_itself(
    server: ssl.SSLContext, client: ssl.SSLContext, cert_file: Path, ca_file: Path
) -> None:
    """A handshake of the two contexts: whatever a peer would refuse is refused here, at the start.

    The certificate is shown once by each end, so both its purposes are proven.
    """
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    try:
        while ends:
            end = ends.pop(0)
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                ends.append(end)
    except ssl.SSLCertVerificationError as exc:
        raise ConfigError(
            f"The TLS certificate {cert_file} would be refused by every peer: "
            f"{exc.verify_message}; it must be valid today, signed by the CA {ca_file}, and meant "
            "for both servers and clients."
        ) from exc
    except ssl.SSLError as exc:
        raise ConfigError(
            f"The TLS certificate {cert_file} cannot be used: {_reason(exc)}."
        ) from exc


def _reason(exc: ssl.SSLError) -> str:
    return (exc.reason or str(exc)).lower().replace("_", " ")
