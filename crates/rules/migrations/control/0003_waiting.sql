-- How many changes wait for an approver is asked whenever one more is to; all changes there ever were are kept.
CREATE INDEX tidegate_changes_waiting ON tidegate_changes (id) WHERE state = 'waiting';
