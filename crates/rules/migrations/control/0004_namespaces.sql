-- Overrides of namespaces. Clients set them without a plan, so they have a revision of their own.
ALTER TABLE tidegate_heads ADD COLUMN override_revision BIGINT NOT NULL DEFAULT 0;

-- The override revision of the last write by a client; 0 if a change wrote the row last.
ALTER TABLE tidegate_rows ADD COLUMN override_revision BIGINT NOT NULL DEFAULT 0;
-- Of a namespace override: SHA-256 of its tenant, namespace and identifier, of the first two, and of the first. Texts may be
-- longer than an index accepts.
ALTER TABLE tidegate_rows ADD COLUMN target TEXT;
ALTER TABLE tidegate_rows ADD COLUMN namespace TEXT;
ALTER TABLE tidegate_rows ADD COLUMN tenant TEXT;
-- 0: no `*`. 1: with a prefix or suffix. 2: without.
ALTER TABLE tidegate_rows ADD COLUMN wildcard BIGINT NOT NULL DEFAULT 0;

CREATE UNIQUE INDEX tidegate_rows_target ON tidegate_rows (target) WHERE target IS NOT NULL;
CREATE INDEX tidegate_rows_tenant ON tidegate_rows (tenant) WHERE tenant IS NOT NULL;
CREATE INDEX tidegate_rows_wildcard ON tidegate_rows (namespace) WHERE wildcard > 0;
CREATE INDEX tidegate_rows_set ON tidegate_rows (override_revision) WHERE override_revision > 0;
