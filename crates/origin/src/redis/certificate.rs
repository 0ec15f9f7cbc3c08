//! Failures of a server's certificate, with their remedy.

/// The name of the cause in errors of rustls. The verifier wraps it in a type of its own, which is
/// no part of the API of rustls.
const CA_USED_AS_END_ENTITY: &str = "CaUsedAsEndEntity";

/// Describes a server that presents a CA certificate, with a command that creates another one.
/// Returns `None` if `cause`, the text of a TLS error, is about something else.
pub fn ca_as_server_certificate(cause: &str) -> Option<&'static str> {
    cause.contains(CA_USED_AS_END_ENTITY).then_some(
        "the certificate of the server is a CA certificate, which no server may present: create one for the \
         names of the server with `openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes \
         -days 365 -keyout key.pem -out cert.pem -subj /CN=localhost -addext \
         basicConstraints=critical,CA:FALSE -addext subjectAltName=DNS:localhost,IP:127.0.0.1`, let the \
         server present it, and trust cert.pem",
    )
}
