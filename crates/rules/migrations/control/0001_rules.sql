-- The rules of a server and how they came to be. The same text for SQLite and for PostgreSQL.
-- Times are milliseconds since the Unix epoch; hashes are SHA-256 in lower-case hexadecimal.

-- One row, which every change locks first: changes happen one after the other.
CREATE TABLE tidegate_heads (
    id                  BIGINT NOT NULL PRIMARY KEY CHECK (id = 1),
    revision            BIGINT NOT NULL,
    emergency_revision  BIGINT NOT NULL,
    credential_revision BIGINT NOT NULL,
    change_count        BIGINT NOT NULL,
    -- What the end of the audit must be: entries that were cut off are missed.
    audit_count         BIGINT NOT NULL,
    audit_hash          TEXT   NOT NULL
);

INSERT INTO tidegate_heads VALUES
    (1, 0, 0, 0, 0, 0, '0000000000000000000000000000000000000000000000000000000000000000');

CREATE TABLE tidegate_rows (
    kind     TEXT   NOT NULL CHECK (kind IN ('template', 'rule', 'override')),
    name     TEXT   NOT NULL,
    -- A JSON object. NULL: deleted; the row stays so that its version goes on and a change made before is a conflict.
    body     TEXT,
    version  BIGINT NOT NULL CHECK (version > 0),
    -- The revision that wrote it last.
    revision BIGINT NOT NULL,
    PRIMARY KEY (kind, name)
);

CREATE TABLE tidegate_changes (
    id              BIGINT NOT NULL PRIMARY KEY,
    state           TEXT   NOT NULL CHECK (state IN ('proposed', 'waiting', 'applied', 'rejected', 'rolled_back')),
    needs           TEXT   NOT NULL CHECK (needs IN ('nothing', 'confirmation', 'approver')),
    base_revision   BIGINT NOT NULL,
    author          TEXT   NOT NULL,
    reason          TEXT   NOT NULL,
    created_ms      BIGINT NOT NULL,
    operation_count BIGINT NOT NULL,
    operations      TEXT   NOT NULL,
    -- What it was expected to do, as whoever proposed it found out.
    effect          TEXT,
    -- The changes that it undoes.
    undoes          TEXT   NOT NULL,
    approver        TEXT   CHECK (approver <> author),
    approved_ms     BIGINT,
    -- Once applied: its revision, and the operations that restore what was there before.
    revision        BIGINT UNIQUE,
    restores        TEXT,
    CHECK ((revision IS NULL) = (state IN ('proposed', 'waiting', 'rejected'))),
    CHECK (revision IS NULL OR needs <> 'approver' OR approver IS NOT NULL)
);

CREATE TABLE tidegate_emergencies (
    id         TEXT   NOT NULL PRIMARY KEY,
    body       TEXT   NOT NULL,
    author     TEXT   NOT NULL,
    created_ms BIGINT NOT NULL,
    expires_ms BIGINT NOT NULL
);

CREATE TABLE tidegate_credentials (
    -- Of the token, which is kept nowhere.
    hash       TEXT   NOT NULL PRIMARY KEY,
    name       TEXT   NOT NULL,
    tenant     TEXT   NOT NULL,
    role       TEXT   NOT NULL,
    created_ms BIGINT NOT NULL,
    expires_ms BIGINT
);

CREATE TABLE tidegate_audit (
    sequence BIGINT NOT NULL PRIMARY KEY CHECK (sequence > 0),
    at_ms    BIGINT NOT NULL,
    actor    TEXT   NOT NULL,
    action   TEXT   NOT NULL,
    detail   TEXT   NOT NULL,
    previous TEXT   NOT NULL,
    hash     TEXT   NOT NULL
);
