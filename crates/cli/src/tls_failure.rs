//! TLS failures of a connection, with their remedy.

use rustls::{AlertDescription, CertificateError, Error, InvalidMessage};
use tidegate::region::redis::ca_as_server_certificate;

/// Describes a failed handshake and its remedy. Returns `None` if the error is not about TLS.
pub(crate) fn describe(error: &ureq::Error) -> Option<String> {
    match error {
        ureq::Error::Rustls(error) => Some(remedy(error)),
        ureq::Error::Io(error) => error.get_ref()?.downcast_ref().map(remedy),
        ureq::Error::Tls(problem) => Some((*problem).to_owned()),
        _ => None,
    }
}

fn remedy(error: &Error) -> String {
    match error {
        Error::InvalidCertificate(problem) => certificate_remedy(problem),
        Error::AlertReceived(AlertDescription::CertificateRequired) => {
            "the server requires a client certificate: pass --client-cert and --client-key".to_owned()
        }
        Error::InvalidMessage(InvalidMessage::InvalidContentType) => {
            "the server does not use TLS on this port: use http:// instead of https://".to_owned()
        }
        other => other.to_string(),
    }
}

fn certificate_remedy(problem: &CertificateError) -> String {
    match problem {
        CertificateError::Other(cause) => ca_as_server_certificate(&cause.to_string())
            .map_or_else(|| invalid(problem), |remedy| format!("{remedy} by --ca")),
        CertificateError::UnknownIssuer => {
            "the issuer of the server's certificate is not trusted: pass its CA \
             certificate, or a self-signed certificate itself, with --ca"
                .to_owned()
        }
        CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => {
            format!("{problem}: connect by a name of the certificate, or add the name to its subjectAltName")
        }
        other => invalid(other),
    }
}

fn invalid(problem: &CertificateError) -> String {
    format!("the certificate of the server is not valid: {problem}")
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::Arc;

    use rustls::OtherError;

    use super::*;

    fn described(error: Error) -> String {
        let error = ureq::Error::Io(io::Error::new(io::ErrorKind::InvalidData, error));
        describe(&error).expect("about TLS")
    }

    #[test]
    fn a_failure_names_its_remedy() {
        let wrapped = OtherError(Arc::new(io::Error::other("CaUsedAsEndEntity")));
        for (error, remedy) in [
            (
                Error::InvalidCertificate(CertificateError::Other(wrapped)),
                "basicConstraints=critical,CA:FALSE",
            ),
            (Error::InvalidCertificate(CertificateError::UnknownIssuer), "with --ca"),
            (Error::InvalidCertificate(CertificateError::NotValidForName), "subjectAltName"),
            (Error::InvalidCertificate(CertificateError::Expired), "not valid: "),
            (Error::AlertReceived(AlertDescription::CertificateRequired), "--client-cert"),
            (Error::InvalidMessage(InvalidMessage::InvalidContentType), "use http://"),
            (Error::DecryptError, "decrypt"),
        ] {
            let text = described(error);
            assert!(text.contains(remedy), "{remedy}: {text}");
        }
    }

    #[test]
    fn other_failures_are_not_about_tls() {
        let refused = io::Error::from(io::ErrorKind::ConnectionRefused);
        assert_eq!(describe(&ureq::Error::Io(refused)), None);
        assert_eq!(describe(&ureq::Error::HostNotFound), None);
    }
}
