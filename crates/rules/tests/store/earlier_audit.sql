-- A store of an earlier version, whose entries lack `effect_sha256` and `created_ms`.
INSERT INTO tidegate_changes (id, state, needs, base_revision, author, reason, created_ms, operation_count,
    operations, effect, undoes, revision, restores) VALUES
    (1, 'applied', 'nothing', 0, 'ada', 'a test', 1700000000000, 1,
    '[{"do":"put","kind":"rule","name":"a","body":"{\"key\":[\"user\"],\"limit\":1,\"period\":\"1m\"}"}]',
    '{"rules":[]}', '[]', 1,
    '[{"do":"delete","kind":"rule","name":"a"}]');
INSERT INTO tidegate_rows (kind, name, body, version, revision) VALUES
    ('rule', 'a', '{"key":["user"],"limit":1,"period":"1m"}', 1, 1);
INSERT INTO tidegate_credentials (hash, name, tenant, role, created_ms, expires_ms) VALUES
    ('0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a', 'ci', '', 'viewer', 7, NULL);
INSERT INTO tidegate_audit (sequence, at_ms, actor, action, detail, previous, hash) VALUES
    (1, 1700000000000, 'ada', 'change.propose',
    '{"base_revision":0,"change":1,"needs":"nothing","operations_sha256":"bcd33a52d279c19923dd59b7811c14285ef4bd93978b9779cea460282adcd27e","reason":"a test","undoes":[]}',
    '0000000000000000000000000000000000000000000000000000000000000000',
    '2a6d15fac1eee1259107f37c4ff73de1e01be60b2bbd795afeac5ad90edef271');
INSERT INTO tidegate_audit (sequence, at_ms, actor, action, detail, previous, hash) VALUES
    (2, 1700000000000, 'ada', 'change.apply',
    '{"approver":null,"author":"ada","change":1,"confirmed":false,"operations_sha256":"bcd33a52d279c19923dd59b7811c14285ef4bd93978b9779cea460282adcd27e","revision":1}',
    '2a6d15fac1eee1259107f37c4ff73de1e01be60b2bbd795afeac5ad90edef271',
    '244a0ffeeddb007967967cac0aa95bf2a7c8ffe919dd2784e747df23653d0b3b');
INSERT INTO tidegate_audit (sequence, at_ms, actor, action, detail, previous, hash) VALUES
    (3, 1700000000000, 'ada', 'credential.put',
    '{"expires_ms":null,"hash":"0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a","name":"ci","role":"viewer","tenant":""}',
    '244a0ffeeddb007967967cac0aa95bf2a7c8ffe919dd2784e747df23653d0b3b',
    '916d4effb64d6e1e3ed7b30761f92bf807f93f7c5326fed4d34ad73165247ff8');
UPDATE tidegate_heads SET revision = 1, credential_revision = 1, change_count = 1, audit_count = 3,
    audit_hash = '916d4effb64d6e1e3ed7b30761f92bf807f93f7c5326fed4d34ad73165247ff8';
