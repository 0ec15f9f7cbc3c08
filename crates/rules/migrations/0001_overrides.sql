-- Limits of the direct form that replace those of the request, for identifiers that match a pattern.
CREATE TABLE overrides (
    -- Told to clients; random, so that it says nothing of other tenants.
    id          TEXT    NOT NULL PRIMARY KEY,
    tenant      TEXT    NOT NULL,
    namespace   TEXT    NOT NULL,
    -- `*` stands for anything.
    identifier  TEXT    NOT NULL,
    amount      INTEGER NOT NULL,
    duration_ms INTEGER NOT NULL,
    -- Milliseconds since the Unix epoch.
    created_ms  INTEGER NOT NULL,
    updated_ms  INTEGER NOT NULL,
    UNIQUE (tenant, namespace, identifier)
) STRICT;
