-- Records, many to a row. `terms` are the hashes of what they can be looked up by, sorted; `body` comes last, so that
-- nobody reads it who only looks for a term.
CREATE TABLE blocks (
    id INTEGER PRIMARY KEY,
    from_ms INTEGER NOT NULL,
    to_ms INTEGER NOT NULL,
    records INTEGER NOT NULL,
    bytes INTEGER NOT NULL,
    region TEXT NOT NULL,
    node TEXT NOT NULL,
    sample_rate REAL NOT NULL,
    terms BLOB NOT NULL,
    body BLOB NOT NULL
) STRICT;

CREATE INDEX blocks_by_time ON blocks (to_ms, from_ms);
