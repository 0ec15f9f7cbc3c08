use tidegate_sim::*;
fn main(){
  let a:Vec<String>=std::env::args().skip(1).collect();
  let from:usize=a[0].parse().unwrap(); let n:usize=a[1].parse().unwrap();
  let c=load_cases().into_iter().find(|c|{let s=format!("lim={}/{}b{}; n={}; {}; x={}; c={};",c.amount,c.period_s,c.burst,c.nodes,c.spread_name,c.load_tenths,c.cost_max);a[2..].iter().all(|x|s.contains(x.as_str()))}).unwrap();
  let mut s=c.scenario(); let secs: u64 = 3; let l=s.length_us; s.length_us=s.length_us.min(secs*1000000); s.requests=s.requests*s.length_us/l;
  let r=run(&s,None,true);
  for l in r.trace.to_string().lines().skip(from).take(n){println!("{l}");}
}
