-- The credentials of a maker, for the search for all related names.
CREATE INDEX tidegate_makers_made_by ON tidegate_makers (made_by);

-- The alarms of an audit of any length.
CREATE INDEX tidegate_audit_alarms ON tidegate_audit (sequence) WHERE action = 'alarm.raise';
