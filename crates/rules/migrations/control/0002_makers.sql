-- Who made credentials of which names. Kept when a credential is revoked: the changes that it proposed are still there to be
-- approved. Nothing is known of those that were made before there was this table.
CREATE TABLE tidegate_makers (
    name         TEXT   NOT NULL,
    made_by      TEXT   NOT NULL,
    -- How many changes had been proposed when the latest of them was made.
    change_count BIGINT NOT NULL,
    PRIMARY KEY (name, made_by)
);
